#!/usr/bin/env bash
# What needs a CUDA device: tests, the probe of copies in HBM, benchmarks. No network is needed.
#
#   run.sh               all parts: tests snapshot save load
#   run.sh tests save    some of them
#   run.sh tests/state/test_state_cuda.py bench/bench_gpu_save.py::test_call    or a part of one
#
# PYTHON (python3) has torch with CUDA, numpy, pytest, pytest-benchmark, safetensors, typer, rich and xxhash; the rest
# are the wheels in wheelhouse/gpu, which `make wheel-gpu` makes, on any machine. They go into a folder that is removed
# afterwards. tierload is that wheel, and never the sources here: tests and benchmarks run from a copy without them.
#
# GPU_SECONDS (570) is the time for everything; a part that is cut off leaves the results that it has written. TMPDIR
# (/var/tmp) decides which disk is measured. With a GPU the results go to bench/results: gpu.txt and the benchmarks'
# *.json. Where OUT names a folder they go there too, these packed into one file.
set -uo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
python=${PYTHON:-python3}
end=$((SECONDS + ${GPU_SECONDS:-570}))
work=$(mktemp -d "${TMPDIR:-/var/tmp}/tierload-gpu.XXXXXX")
trap 'rm -rf "$work"' EXIT
failed=0

compgen -G 'wheelhouse/gpu/tierload-*.whl' >/dev/null || {
  echo "wheelhouse/gpu has no wheel of tierload: run make wheel-gpu, here or elsewhere, and bring the folder along" >&2
  exit 2
}
mkdir -p "$work/site" "$work/tmp" "$work/run/docs" "$work/out"
"$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --root-user-action ignore \
  --disable-pip-version-check --target "$work/site" wheelhouse/gpu/*.whl || exit 2
cp -r tests bench pyproject.toml "$work/run"
cp docs/BENCHMARKS.md "$work/run/docs"
rm -f "$work"/run/bench/results/*
cd "$work/run"
export PYTHONPATH=$work/site TMPDIR=$work/tmp PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PYTHONDONTWRITEBYTECODE=1
BENCH_COMMIT=$(cat "$root/wheelhouse/gpu/commit" 2>/dev/null)
export BENCH_COMMIT
log=$work/out/gpu.txt

"$python" - "$work/site" <<'PYTHON' 2>&1 | tee "$log"
import sys
from pathlib import Path

import torch

import tierload
from bench.hardware import describe

if not Path(tierload.__file__).is_relative_to(sys.argv[1]):
    sys.exit(f"tierload comes from {tierload.__file__}, not from its wheel")
for name, value in describe(Path.cwd()).items():
    print(f"{name}: {value}")
if not torch.cuda.is_available():
    print("no CUDA device: everything is skipped")
PYTHON
[ "${PIPESTATUS[0]}" = 0 ] || exit 2

part() { # name, seconds, command...
  local name=$1 limit=$2 status left=$((end - SECONDS))
  shift 2
  [ "$left" -lt "$limit" ] && limit=$left
  if [ "$limit" -lt 10 ]; then
    echo "== $name: no time left" | tee -a "$log"
    failed=1
    return
  fi
  echo "== $name: ${*//$work\/run\//}" | tee -a "$log"
  OUT=$work/out timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$log"
  status=${PIPESTATUS[0]}
  # 5: pytest found no test
  if [ "$status" != 0 ] && [ "$status" != 5 ]; then
    echo "== $name: FAILED, status $status (124: cut off after $limit s)" | tee -a "$log"
    failed=1
  fi
}

pytest=("$python" -m pytest -q -p no:cacheprovider --tb=short)
tests=("${pytest[@]}" -m gpu)
benchmarks=("${pytest[@]}" -m '' --benchmark-enable --benchmark-only --benchmark-columns=rounds)
mapfile -t files < <(grep -rlE 'pytest\.mark\.gpu' tests --include='test_*.py' | sort)
[ $# -gt 0 ] || set -- tests snapshot save load
for name in "$@"; do
  case $name in
    tests) part tests 240 "${tests[@]}" "${files[@]}" ;;
    tests/*) part "$name" 240 "${tests[@]}" "$name" ;;
    snapshot) part snapshot 120 "$python" -m bench.gpu_snapshot ;;
    save | load) part "$name" 400 "${benchmarks[@]}" "bench/bench_gpu_$name.py" ;;
    bench/*) part "$name" 400 "${benchmarks[@]}" "$name" ;;
    *) echo "no part is called $name: tests, snapshot, save, load" >&2; failed=1 ;;
  esac
done

"$python" - <<'PYTHON' 2>&1 | tee -a "$log"
import json
from pathlib import Path

for path in sorted(Path("bench/results").glob("*.json")):
    result = json.loads(path.read_text())
    print(f"-- {result['name']}: {result['title']}")
    for figure in result["figures"]:
        limit = figure["limit"]
        asked = "" if limit is None else f"  (asked ≤ {limit:.4g}: {'held' if figure['value'] <= limit else 'NOT HELD'})"
        print(f"   {figure['what']}: {figure['value']:.4g} {figure['unit']} {figure['note']}{asked}")
PYTHON

if grep -q '^gpu: ' "$log"; then
  cp "$log" bench/results/*.json "$root/bench/results/" 2>/dev/null
fi
if [ -n "${OUT:-}" ]; then
  cp "$work"/out/* "$OUT"
  tar -C bench/results -czf "$OUT/results.tar.gz" .
fi
exit $failed
