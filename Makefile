# Developer commands. Each sets up what it needs inside .venv and does nothing twice.
#
#   make run        install, fetch the default model, answer a prompt      (PROMPT="...", MODEL=...)
#   make test       default tests: no PyTorch                              (PYTEST_ARGS="-k name")
#   make test-all   default and slow tests: PyTorch, other clients, a browser, fuzzing
#   make test-slow  slow tests alone; both need Node.js with npm, curl and Chromium
#   make lint       ruff, mypy, import-linter, clang-format                make fmt repairs formatting
#   make build      compile the extension after a change in csrc/
#   make sanitize   kernel tests under address and undefined sanitizers    (SANITIZE=thread)
#   make bench      tellin beside the engines that are installed           (BENCH_ARGS="--quick")
#   make microbench single kernels (needs Google Benchmark)                 (MICROBENCH_ARGS="--benchmark_filter=...")
#   make wheel      a wheel in dist/
#   make clean      remove .venv and build/

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

# The first Python >= 3.11 that is found, unless told: make PYTHON=/path/to/python run
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
VENV ?= .venv
MODEL ?= smollm2
PROMPT ?= What is the capital of France?
MAX_TOKENS ?= 64
PYTEST_ARGS ?=
BENCH_ARGS ?=
MICROBENCH_ARGS ?=
SANITIZE ?= address,undefined
SANITIZE_TESTS ?= tests/kernels
# A user's newer compiler may know new warnings; CI lets none through.
WERROR ?= $(if $(CI),ON,OFF)
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
# Test processes; PYTEST_ARGS="-n 0" runs tests in one, where a debugger can be used. A file's tests stay together.
WORKERS ?= $(JOBS)
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist loadscope

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
BUILD := build/dev
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
# cmake and ninja come from PyPI, so that a compiler is all the system has to have.
BUILD_REQUIRES := "scikit-build-core>=1.0" "nanobind>=3.0" "cmake>=3.22" ninja
CPP_SOURCES := $(shell find csrc CMakeLists.txt -type f 2>/dev/null)
CPP_FORMATTED := $(filter %.cpp %.h,$(CPP_SOURCES)) $(wildcard benchmarks/*.cpp benchmarks/micro/*.cpp benchmarks/micro/*.h)

export PATH := $(abspath $(BIN)):$(PATH)
# CMake looks for the headers of the interpreter it runs under: never for another environment's.
export VIRTUAL_ENV := $(abspath $(VENV))

.PHONY: help run test test-all test-slow lint fmt build sanitize bench microbench wheel clean

help:
	@sed -n '3,/^$$/s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

# ------------------------------------------------------------------ environment

$(STAMPS)/venv:
	@[ -n "$(PYTHON)" ] || { echo "error: no Python >= 3.11 found; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@# Debian's python3 has no ensurepip without python3-venv: then pip comes from the outer Python.
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV); \
		$(PYTHON) -m pip -qq --python $(BIN)/python install pip; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build-requires: | $(STAMPS)/venv
	@$(PIP) install $(BUILD_REQUIRES)
	@touch $@

# Editable: Python changes count at once, C++ changes after `make build`.
$(STAMPS)/install: pyproject.toml $(STAMPS)/build-requires
	@echo "installing tellin into $(VENV) (the first build takes some minutes)"
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) install --no-build-isolation \
		--config-settings=build-dir=$(BUILD) --config-settings=cmake.define.TELLIN_WERROR=$(WERROR) \
		--editable .
	@touch $@

$(STAMPS)/extension: $(CPP_SOURCES) $(STAMPS)/install
	@[ ! -e $@ ] || echo "compiling the extension"
	@cmake --build $(BUILD) --parallel $(JOBS) > $(BUILD)/build.log 2>&1 || { cat $(BUILD)/build.log; exit 1; }
	@cmake --install $(BUILD) --prefix "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" >> $(BUILD)/build.log
	@touch $@

# One stamp per extra of pyproject.toml.
$(STAMPS)/extra-%: pyproject.toml $(STAMPS)/install
	@echo "installing the $* requirements"
	@$(PIP) install $$($(BIN)/python scripts/requirements.py $*)
	@touch $@

build: $(STAMPS)/extension

# ------------------------------------------------------------------ use

run: build
	@$(BIN)/tellin pull $(MODEL) > /dev/null
	@$(BIN)/tellin generate --model $(MODEL) --max-tokens $(MAX_TOKENS) "$(PROMPT)"

# ------------------------------------------------------------------ checks

test: build $(STAMPS)/extra-test
	@$(PYTEST) $(PYTEST_ARGS)

# Slow tests make an environment of their own for other clients; Node.js with npm, curl and Chromium are the system's.
SLOW_EXTRAS := $(foreach extra,test reference page-test,$(STAMPS)/extra-$(extra))

test-all: build $(SLOW_EXTRAS)
	@$(PYTEST) -m "slow or not slow" $(PYTEST_ARGS)

test-slow: build $(SLOW_EXTRAS)
	@$(PYTEST) -m slow $(PYTEST_ARGS)

lint: $(STAMPS)/extra-lint
	@$(BIN)/ruff check --quiet --output-format concise
	@$(BIN)/ruff format --check --quiet --diff
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --quiet 2>/dev/null || $(BIN)/lint-imports
	@$(BIN)/clang-format --dry-run -Werror $(CPP_FORMATTED)
	@echo "lint: clean"

fmt: $(STAMPS)/extra-lint
	@$(BIN)/ruff check --quiet --fix --exit-zero --output-format concise
	@$(BIN)/ruff format --quiet
	@$(BIN)/clang-format -i $(CPP_FORMATTED)

sanitize: build $(STAMPS)/extra-test
	@$(BIN)/python scripts/sanitize.py --sanitizers $(SANITIZE) --jobs $(JOBS) -- $(SANITIZE_TESTS)

# ------------------------------------------------------------------ measurements and packages

bench: build $(STAMPS)/extra-bench
	@$(BIN)/python -m benchmarks compare $(BENCH_ARGS)

microbench: build
	@cmake $(BUILD) > /dev/null
	@cmake --build $(BUILD) --target help | grep -q bench_kernels || { \
		echo "error: Google Benchmark is not installed (on Debian: apt install libbenchmark-dev)" >&2; exit 1; }
	@cmake --build $(BUILD) --parallel $(JOBS) --target bench_kernels > $(BUILD)/build.log 2>&1 || { cat $(BUILD)/build.log; exit 1; }
	@$(BUILD)/bench_kernels $(MICROBENCH_ARGS)

wheel: $(STAMPS)/venv
	@$(PIP) wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build
