#!/usr/bin/env bash
# Builds the fuzzers and runs each for so many seconds (default 60), two at a time on two cores.
#
# A fuzzer starts from native/fuzz/corpus/NAME, where there is one, and keeps what it finds in build/fuzz/corpus/NAME.
# Input that crashes one is kept in build/fuzz/crashes, and the script fails.
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=${1:-${FUZZ_SECONDS:-60}}

cmake --preset fuzz >/dev/null
cmake --build --preset fuzz
mkdir -p build/fuzz/crashes build/fuzz/logs

fuzz() {
  local name=${1##*/} seconds=$2 log status=0
  local found=build/fuzz/corpus/$name seeds=native/fuzz/corpus/$name
  log=build/fuzz/logs/$name
  mkdir -p "$found"
  [ -d "$seeds" ] || seeds=
  "$1" "$found" ${seeds:+"$seeds"} -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="build/fuzz/crashes/$name-" >"$log" 2>&1 || status=$?
  local executions
  executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  if [ "$status" = 0 ]; then
    echo "$name: $executions executions in $seconds s, no crash"
  else
    tail -n 60 "$log"
    echo "$name: FAILED after ${executions:-?} executions; input in build/fuzz/crashes, log in $log"
  fi
  return "$status"
}
export -f fuzz

find build/fuzz/fuzzers -maxdepth 1 -type f -executable -print0 | sort -z |
  xargs -0 -P "$(nproc)" -I{} bash -c 'fuzz "$1" "$2"' _ {} "$seconds"
