# `make demo` and `make test` set up everything they need, the virtual environment included.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRAINS := $(VENV)/.trains
READY := $(VENV)/.ready

.PHONY: help demo test check browser examples gpu test-torch unit e2e clean

help:
	@echo "make demo    compile a library scheme, train a byte-level GPT with it on four processes, time it beside 1F1B"
	@echo "make test    every check and test"
	@echo "make check   format, lint, types"
	@echo "make browser install the headless browser that one test needs, where that is permitted"
	@echo "make examples  install what examples/hf_gpt2.py needs beside torch"
	@echo "make gpu     try a machine with GPUs and leave gpu-report.md; GPU='--pretend 4' lets the CPU stand in for four"
	@echo "make test-torch TORCH=2.6.0  the tests of the runtime under that release of torch"
	@echo "make clean   remove the virtual environment and everything that was built"

# Two stamps: what compiling and training need, and what the tests need beside it.
$(TRAINS): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "chimera_ir needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing chimera_ir, torch and numpy into $(VENV): a minute, or more where torch has to be downloaded"
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[train]'
	@touch $@

$(READY): $(TRAINS)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(TRAINS)
	@$(BIN)/python examples/demo.py

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

browser:
	tests/browser.sh

# What examples/hf_gpt2.py needs; without a package index its test is skipped.
examples: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[examples]' || echo "no transformers: a test is skipped"

# Tests start hundreds of processes of the same modules; without bytecode each of them would compile these again.
# Neighbours stay on one worker as far as can be, as they share what they compile. Ranks often wait, for one another and
# for time to pass: in the end-to-end half four workers share two cores.
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY)
	@$(MAKE) --jobs=3 check browser examples
	$(BIN)/pytest tests chimera_ir docs/paper_tables docs/conformance --doctest-modules --ignore=tests/e2e --numprocesses=auto --dist=worksteal
	$(BIN)/pytest tests/e2e --ignore=tests/e2e/models --numprocesses=4 --dist=loadfile --no-loadscope-reorder

# What the steps are, and what they have to say: tests/gpu. GPU_PYTHON is an interpreter that has chimera_ir and a torch
# for the machine's driver, if the torch of constraints.txt is none.
GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(READY))
	$(GPU_PYTHON) -m tests.gpu $(GPU)

# An environment of its own for each release; what it needs beside torch is what `make test` has.
TORCH_VENV := .venv-torch-$(TORCH)
test-torch: export PYTHONDONTWRITEBYTECODE =
test-torch:
	$(if $(TORCH),,$(error which release? make test-torch TORCH=2.6.0))
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[dev]' 'torch==$(TORCH)'
	$(TORCH_VENV)/bin/pytest tests/unit/runtime tests/e2e/test_check.py tests/e2e/test_failures.py --numprocesses=auto --dist=worksteal

clean:
	rm -rf $(VENV) .venv-torch-* gpu.out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
