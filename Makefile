# Every target sets up what it needs in .venv, from constraints.txt, on a machine with nothing but Python 3.11 or newer.
.DEFAULT_GOAL := help
.PHONY: help demo notebooks docs test test-all lint format check-kernels ptxsim bench tables sanitize clean
SHELL := /bin/bash

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	"$$p" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

# The compile checks run with these two, whatever Triton the environment itself has. Triton and the CuTe DSL have wheels for Linux only.
OLDEST_TRITON := 3.6.0
NEWEST_TRITON := 3.9.0
ifeq ($(shell uname -s),Linux)
TRITONS := $(VENV)/triton-$(OLDEST_TRITON)/.ready $(VENV)/triton-$(NEWEST_TRITON)/.ready
CUTE := $(VENV)/.cute
endif

# One thread a process: the tests run in as many processes as there are cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
WORKERS ?= 2
ARGS ?=

help:
	@echo 'make demo           a real text through a stack of M3 attention layers, reference and Triton side by side (ARGS="--text FILE")'
	@echo 'make notebooks      notebooks/*.py as executed .ipynb files in build/notebooks'
	@echo 'make docs           the documentation as a site in build/site, every warning an error'
	@echo 'make test           lint, types, the documentation, and the tests that CI runs (about a quarter of an hour on 2 cores)'
	@echo 'make check-kernels  every kernel for every architecture: Triton with the oldest and the newest release, each CuTe variant'
	@echo 'make ptxsim         the interpreter that executes CuTe DSL kernels on a CPU: its own tests, and those of the kernels'
	@echo 'make test-all       everything above, and the slow tests'
	@echo 'make bench          the benchmarks of the stages, on a GPU (ARGS="STAGE … --json OUT")'
	@echo 'make tables         rewrite the tables of README.md and docs/ from results/'
	@echo 'make sanitize       small calls of every kernel under compute-sanitizer, on a GPU'
	@echo 'make lint, format   ruff and mypy; ruff with fixes'
	@echo 'make clean          remove .venv and everything built'

$(VENV)/.ready: pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo 'make: no Python 3.11 or newer with ensurepip found; name one with PYTHON=/path/to/python' >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) pip setuptools wheel
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/triton-%/.ready: $(VENV)/.ready
	rm -rf $(VENV)/triton-$*
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-compile --target $(VENV)/triton-$* triton==$*
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/m3attn demo $(ARGS)

# The sixth runs a CuTe kernel, whose compiler is there on Linux only.
notebooks: $(VENV)/.ready $(CUTE)
	$(PIP) --no-build-isolation --editable '.[notebooks,hf]'
	mkdir -p build/notebooks
	for notebook in $(filter-out $(if $(CUTE),,notebooks/06%),$(wildcard notebooks/*.py)); do \
		$(BIN)/jupytext --quiet --to ipynb --output build/notebooks/"$$(basename "$$notebook" .py)".ipynb "$$notebook" || exit 1; \
	done
	$(BIN)/jupyter-execute --inplace build/notebooks/*.ipynb

$(VENV)/.docs: $(VENV)/.ready
	$(PIP) --no-build-isolation --editable '.[dev,docs]'
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint docs $(TRITONS) $(CUTE)
	$(PYTEST) -n $(WORKERS) -m 'not slow' $(ARGS)

check-kernels: $(VENV)/.ready $(TRITONS) $(CUTE)
	$(PYTEST) -n $(WORKERS) -m slow tests/test_compile.py tests/dsl $(ARGS)

$(VENV)/.cute: $(VENV)/.ready
	$(PIP) --no-build-isolation --editable '.[dev,cute]'
	@touch $@

ptxsim: $(VENV)/.cute
	$(PYTEST) -n $(WORKERS) tests/ptxsim tests/dsl $(ARGS)

test-all: lint docs $(TRITONS) $(CUTE)
	$(PYTEST) -n $(WORKERS) $(ARGS)

bench: $(VENV)/.ready
	$(BIN)/m3attn bench $(ARGS)

tables: $(VENV)/.ready
	$(BIN)/python -m m3attn.bench.tables

# --target-processes all would follow ptxas and the linker too; the tests' own process is the one that launches.
sanitize: $(VENV)/.ready $(CUTE)
	@command -v compute-sanitizer >/dev/null || { echo 'make: compute-sanitizer (part of the CUDA toolkit) is not on PATH' >&2; exit 1; }
	for tool in memcheck initcheck synccheck; do \
		compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 1 $(BIN)/python tests/sanitize.py $(ARGS) || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
