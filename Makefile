# `make demo` and `make test` set up everything they need, the virtual environment included.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test check browser examples unit e2e clean

help:
	@echo "make demo    compile a library scheme and train a byte-level GPT with it on four processes"
	@echo "make test    every check and test"
	@echo "make check   format, lint, types"
	@echo "make browser install the headless browser that one test needs, where that is permitted"
	@echo "make examples  install what examples/hf_gpt2.py needs beside torch"
	@echo "make clean   remove the virtual environment and everything that was built"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "chimera_ir needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

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
# for time to pass: in the end-to-end half three workers share two cores.
test: export PYTHONDONTWRITEBYTECODE =
test: check browser examples
	$(BIN)/pytest tests chimera_ir docs/paper_tables docs/conformance --doctest-modules --ignore=tests/e2e --numprocesses=auto --dist=worksteal
	$(BIN)/pytest tests/e2e --ignore=tests/e2e/models --numprocesses=3 --dist=loadfile --no-loadscope-reorder

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
