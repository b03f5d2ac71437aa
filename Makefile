# make demo    environment, install, and the main job from end to end
# make test    environment, install, lint, types, and the tests of the package that need no GPU
# PYTHON=...   the interpreter to build the environment with (3.11 or newer)

CANDIDATES := python3.11 python3.12 python3.13 python3 python
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
# A candidate must run, not only be found: version managers leave names on the path that do not.
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	"$$p" -c '$(NEW_ENOUGH)' 2>/dev/null && { echo "$$p"; break; }; done)
NEED_PYTHON = test -n "$(PYTHON)" || \
	{ echo "no Python 3.11 or newer found; name one: make PYTHON=/path/to/python3"; exit 1; }

VENV := .venv
EXTRAS := dev,docs,gpu-dev,io
BIN := $(VENV)/bin
# Of the tests; more than four gain little, and want a GiB or two each.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n > 4 ? 4 : n)))
PIP := -m pip --disable-pip-version-check install --quiet -c constraints.txt
STAMP := $(VENV)/.stamp

VENV36 := .venv-triton36
PIP36 := -m pip --disable-pip-version-check install --quiet -c $(VENV36)/constraints.txt
STAMP36 := $(VENV36)/.stamp

export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help env demo docs test test-all lint pytest test-benchmarks bench shape lint-kernels sanitize clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile | head -3
	@echo "also         make env, docs, test-all, test-benchmarks, lint, bench, shape, lint-kernels, sanitize, clean"

env: $(STAMP)

# torch goes first, so that the one request for it is the pinned one.
$(STAMP): pyproject.toml constraints.txt
	@$(NEED_PYTHON)
	@$(BIN)/python -c '$(NEW_ENOUGH)' 2>/dev/null || \
		{ echo "env: creating $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv --clear $(VENV); }
	@echo "env: installing torch"
	@$(BIN)/python $(PIP) setuptools torch==2.13.0
	@echo "env: installing pumice[$(EXTRAS)]"
	@$(BIN)/python $(PIP) --no-build-isolation -e ".[$(EXTRAS)]"
	@touch $@
	@echo "env: ready in $(VENV)"

demo: env
	@$(BIN)/pumice demo

# Without a network; warnings are errors. The gallery's scripts run.
docs: env
	@echo "docs: build/site/index.html"
	@$(BIN)/python -m sphinx -W --keep-going --quiet -d build/doctrees docs build/site

lint: env
	@echo "lint: ruff"
	@$(BIN)/python -m ruff check --quiet .
	@$(BIN)/python -m ruff format --quiet --check . || \
		{ echo "not formatted; run: $(BIN)/ruff format ."; exit 1; }
	@echo "lint: pyright"
	@$(BIN)/python -m pyright --pythonpath $(BIN)/python

# The linters and the tests at once: what a core does not do for the one it does for the other.
test: env
	@$(MAKE) --no-print-directory --jobs=2 lint pytest

pytest: env
	@echo "test: what needs no GPU, by $(WORKERS) processes; without further cases of the same (make test-all)"
	@$(BIN)/python -m pytest -q -m "not gpu and not wide" --numprocesses=$(WORKERS) --dist=worksteal

test-all: env
	@$(BIN)/python -m pytest -q -m "not gpu" --numprocesses=$(WORKERS) --dist=worksteal

test-benchmarks: env
	@echo "test: benchmarks"
	@$(BIN)/python -m pytest -q -m "not gpu and not wide" --numprocesses=$(WORKERS) --dist=worksteal benchmarks/tests

bench: env
	@echo "bench: installing the peers"
	@$(BIN)/python $(PIP) --no-build-isolation -e ".[bench]"
	@$(BIN)/python -m benchmarks

shape: env
	@$(BIN)/python scripts/shape.py

# The kernels are compiled for every target without a GPU, under the older Triton too. This needs a CPU build of torch:
# a CUDA build insists on its own Triton.
lint-kernels: $(STAMP36)
	@if [ -d tests/kernels ]; then $(VENV36)/bin/python -m pytest -q --numprocesses=$(WORKERS) --dist=worksteal tests/kernels; \
	else echo "lint-kernels: there is no tests/kernels yet"; fi

# The kernels that find neighbours, under the checkers of NVIDIA's compute-sanitizer; needs a GPU.
sanitize:
	@for tool in memcheck racecheck; do echo "sanitize: $$tool"; \
	compute-sanitizer --tool $$tool --error-exitcode 1 "$(PYTHON)" -m pytest -q -m gpu tests/gpu/test_maps.py || exit 1; done

$(STAMP36): pyproject.toml constraints.txt
	@$(NEED_PYTHON)
	@echo "lint-kernels: building $(VENV36) with Triton 3.6.0"
	@"$(PYTHON)" -m venv --clear $(VENV36)
	@sed 's/^triton==.*/triton==3.6.0/' constraints.txt > $(VENV36)/constraints.txt
	@$(VENV36)/bin/python $(PIP36) setuptools torch==2.13.0
	@$(VENV36)/bin/python $(PIP36) --no-build-isolation -e ".[dev,gpu-dev]"
	@touch $@

clean:
	@rm -rf $(VENV) $(VENV36) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis pumice-runs
	@echo "clean: environments, caches and outputs removed"
