# `make demo` and `make test` set up everything they need, the virtual environment included.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRAINS := $(VENV)/.trains
READY := $(VENV)/.ready
ACTIVATE = @echo "chimera is installed in $(VENV): source $(BIN)/activate makes it a command of this shell"

.PHONY: help demo test test-all check docs browser examples torchtitan typescript gpu versions clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F '|' '{ printf "%-16s %s\n", $$1, $$2 }'

# A command that is silent for long, with a dot every five seconds.
WITH_DOTS := with_dots() { (while sleep 5; do printf .; done) & dots=$$!; "$$@"; status=$$?; kill $$dots; echo; return $$status; }; with_dots

define INSTALL
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "chimera_ir needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@echo "installing chimera_ir, $(2) into $(VENV): a minute, or more where torch has to be downloaded"
	@$(PYTHON) -m venv $(VENV)
	@$(WITH_DOTS) $(BIN)/python .ci/install.py $(VENV) $(1)
	$(ACTIVATE)
endef

# Two stamps: what compiling and training need, and the same with what the tests need.
$(TRAINS): pyproject.toml constraints.txt
	$(call INSTALL,train,torch and numpy)
	@touch $@

$(READY): pyproject.toml constraints.txt
	$(call INSTALL,dev,torch and what the tests need)
	@touch $(TRAINS) $@

demo: $(TRAINS)  ## compile a library scheme, train a byte-level GPT with it on four processes, time it beside 1F1B
	@$(BIN)/python examples/demo.py

check: $(READY)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site. It loads nothing from elsewhere, and is searched without a server.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(READY)  ## build the site of the docs into build/site; a broken link is an error
	$(BIN)/python -m mkdocs build --quiet --strict
	@echo "open build/site/index.html"

browser:  ## install the headless browser that some tests need, where that is permitted
	tests/browser.sh

# What --hf and examples/hf_gpt2.py need; without a package index their tests are skipped.
examples: $(READY)  ## install what models of transformers need beside torch
	$(BIN)/python .ci/install.py $(VENV) hf || echo "no transformers: their tests are skipped"
	$(BIN)/python .ci/install.py $(VENV) peft || echo "no peft: its tests are skipped"

# What examples/torchtitan needs, apart from what other tests import: without what torchtitan needs for its trainer.
# Without a package index its test is skipped.
TITAN := torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring_parser==0.18.0
torchtitan: $(READY)  ## install torchtitan for the test of examples/torchtitan
	@test -d $(VENV)/torchtitan || $(BIN)/pip install --quiet --no-compile --disable-pip-version-check --no-deps \
	  --target $(VENV)/torchtitan $(TITAN) || echo "no torchtitan: a test is skipped"

# What checks the types in the scripts of a page. Without npm its test is skipped.
TYPESCRIPT := typescript@7.0.2
typescript: $(READY)  ## install what checks the types in the scripts of a page
	@test -d $(VENV)/typescript || npm install --silent --no-audit --no-fund --prefix $(VENV)/typescript $(TYPESCRIPT) \
	  || echo "no TypeScript: a test is skipped"

# The checks run at the same time as the tests, and what they say comes in one piece. A worker has whole files, as the
# tests of a file share what they compile and run. Without bytecode each process would compile its modules again.
PYTEST := $(BIN)/pytest -n auto --dist=loadfile tests chimera_ir docs/paper_tables docs/conformance --doctest-modules
test test-all: export PYTHONDONTWRITEBYTECODE =
test: $(READY)  ## the checks, unit tests, and a core of trainings
	@$(MAKE) --no-print-directory --jobs=2 checked tested

test-all: test examples torchtitan typescript  ## make test, and all other tests: every training, page, command of the docs
	$(PYTEST) -m full

.PHONY: checked tested
checked:
	@log=$$(mktemp); $(MAKE) --no-print-directory check >$$log 2>&1; status=$$?; cat $$log; rm $$log; exit $$status

tested: browser
	$(PYTEST) -m "not full"

# What the steps are, and what they have to say: tests/gpu. GPU_PYTHON is an interpreter that has chimera_ir and a torch
# for the machine's driver, if the torch of constraints.txt is none.
GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(READY))  ## try a machine with GPUs, write gpu-report.md; GPU='--pretend 4' lets the CPU stand in for four
	$(GPU_PYTHON) -m tests.gpu $(GPU)

# Hours on two cores, and gigabytes of CUDA packages for each torch that the machine has no CPU build of.
versions: export PYTHONDONTWRITEBYTECODE =
versions: $(READY)  ## try the lowest and the newest releases that pyproject.toml allows, and other Pythons; NAMES='lowest python3.12'
	$(BIN)/python .ci/versions.py $(NAMES)

clean:  ## remove the virtual environment and everything that was built
	rm -rf $(VENV) .venv-versions gpu.out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
