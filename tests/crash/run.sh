#!/usr/bin/env bash
# The crash tests: enumeration on the simulated file system, seeded mistakes, power cuts on real file systems, kills,
# signals to a run that saves in the background, and block by block where io_uring writes.
#
#   run.sh smoke   a part of each, about 2 minutes; part of `make test`
#   run.sh         everything, `make crash`; the table also goes to bench/results/crash.txt
#
# CRASH_SECONDS (600) is how long the enumeration runs; it goes on until CRASH_STATES (1000000) distinct states are
# seen. CRASH_SEEDS (6) is the number of workloads that are cut, killed and failed at every call; CRASH_MUTANT_SECONDS
# (60) the time in which each mistake must be found. Exit code 0: nothing bad, though parts may have been skipped.
set -euo pipefail
cd "$(dirname "$0")/../.."

build=build/release/native
results=bench/results/crash.txt
rows=$(mktemp)
output=$(mktemp)
trap 'rm -f "$rows" "$output"' EXIT
failed=0
skipped=0

row() { # test, points, bad, seconds, note
  local IFS=$'\t'
  echo "$*" >>"$rows"
}

skip() { # test, reason
  echo "SKIPPED $1: $2"
  row "$1" - - - "SKIPPED: $2"
  skipped=$((skipped + 1))
}

# The number behind `$1` in the output of the last run.
number() { sed -nE "/$1 [0-9]/{s/.*$1 ([0-9]+).*/\1/p;q}" "$output"; }

enumerate() { # seconds, workloads, states to reach
  local start=$SECONDS seed=1 states=0 images=0 workloads=0 bad=0 ok=1 more
  while [ "$ok" = 1 ]; do
    "$build/tierload_crash" run "$1" "$2" "$seed" | tee "$output" || ok=0
    more=$(number 'enumeration:')
    if [ -z "$more" ]; then
      echo "tierload_crash did not finish"
      bad='?'
      break
    fi
    workloads=$((workloads + more))
    states=$((states + $(number 'distinct states')))
    images=$((images + $(number 'distinct images')))
    bad=$((bad + $(number 'lost') + $(number 'future') + $(number 'false corruption')))
    seed=$((seed + more))
    if [ "$states" -ge "$3" ]; then break; fi
    echo "$states distinct states so far, at least $3 wanted"
  done
  if [ "$ok" = 0 ] || [ "$bad" != 0 ]; then failed=1; fi
  row "enumeration, simulated disk" "$states" "$bad" $((SECONDS - start)) \
    "states; $images images, $workloads workloads"
}

mutants() { # seconds for each, at most
  local start=$SECONDS
  "$build/tierload_crash" mutants "$1" | tee "$output" || failed=1
  row "seeded mistakes, simulated disk" "$(sed -nE 's/^([0-9]+) mutants, .*/\1/p' "$output")" \
    "$(number 'mutants,')" $((SECONDS - start)) "bad: not found"
}

on_file_system() { # script, test, file system, options
  local status=0 script=$1 test=$2 fs=$3
  shift 3
  python3 "tests/crash/$script" --fs "$fs" --rows "$rows" "$@" | tee "$output" || status=$?
  if [ "$status" = 5 ]; then
    skip "$test, $fs" "$(tail -n 1 "$output")"
  elif [ "$status" != 0 ]; then
    failed=1
  fi
}

power_cuts() { # file system, options
  on_file_system powercut.py "power cut" "$@"
}

block_log() { # file system, options
  on_file_system blocklog.py "block log" "$@"
}

kills() { # options
  python3 tests/crash/kills.py --rows "$rows" "$@" || failed=1
}

storms() { # options
  python3 tests/crash/storms.py --rows "$rows" "$@" || failed=1
}

ranks() { # options
  python3 tests/crash/ranks_storm.py --rows "$rows" "$@" || failed=1
}

hardware() {
  local model memory
  model=$(sed -nE 's/^model name[[:space:]]*: (.*)/\1/p' /proc/cpuinfo | head -n 1)
  memory=$(awk '/^MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo)
  echo "${model:-$(uname -m)}, $(nproc) cores, $memory; Linux $(uname -r)"
}

table() {
  printf '%-60s %10s %6s %8s  %s\n' test points bad seconds note
  while IFS=$'\t' read -r name points bad seconds note; do
    printf '%-60s %10s %6s %8s  %s\n' "$name" "$points" "$bad" "$seconds" "$note"
  done <"$rows"
}

verdict() {
  if [ "$failed" != 0 ]; then
    echo "FAILED"
  elif [ "$skipped" != 0 ]; then
    echo "nothing bad; NOT everything was tested: $skipped parts were skipped, see above"
  else
    echo "nothing bad"
  fi
}

case ${1:-all} in
  smoke)
    mutants 60 # a limit: each takes a second or two
    power_cuts ext4 --seeds 1 --points 15 --recoveries 1
    kills --seeds 1 --points 50 --recoveries 1 --errors ''
    storms --points 8
    ranks --points 3
    block_log ext4 --seeds 1 --points 40 --lies 'the journal is not synced'
    enumerate 100 560 0
    echo
    table
    verdict
    ;;
  all)
    seeds=${CRASH_SEEDS:-6}
    kills --seeds "$seeds"
    storms --points 400
    ranks --points "${CRASH_RANKS:-2000}"
    power_cuts ext4 --seeds "$seeds"
    power_cuts xfs --seeds "$seeds"
    block_log ext4 --seeds "$seeds"
    block_log xfs --seeds "$seeds"
    mutants "${CRASH_MUTANT_SECONDS:-60}"
    enumerate "${CRASH_SECONDS:-600}" 1000 "${CRASH_STATES:-1000000}"
    echo
    mkdir -p "${results%/*}"
    {
      echo "$(date -u +%F), $(hardware)"
      echo "CRASH_SECONDS=${CRASH_SECONDS:-600} CRASH_SEEDS=$seeds make crash"
      echo
      table
      verdict
    } | tee "$results"
    ;;
  *)
    echo "usage: run.sh [smoke]" >&2
    exit 2
    ;;
esac
exit "$failed"
