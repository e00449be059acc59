# `make demo` and `make test` set up everything they need, the virtual environment included.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRAINS := $(VENV)/.trains
READY := $(VENV)/.ready
COMPILED := $(VENV)/.compiled
ACTIVATE = @echo "chimera is installed in $(VENV): source $(BIN)/activate makes it a command of this shell"

.PHONY: help demo quick test check docs browser examples torchtitan typescript gpu versions clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F '|' '{ printf "%-16s %s\n", $$1, $$2 }'

# A command that is silent for long, with a dot every five seconds.
WITH_DOTS := with_dots() { (while sleep 5; do printf .; done) & dots=$$!; "$$@"; status=$$?; kill $$dots; echo; return $$status; }; with_dots

# The interpreter that was asked for; where none was, a fast one.
CHOSEN = $(if $(filter file,$(origin PYTHON)),$(PYTHON) .ci/interpreter.py,echo $(PYTHON))

define INSTALL
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "chimera_ir needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@echo "installing chimera_ir, $(2) into $(VENV): a minute, or more where torch has to be downloaded"
	@python=$$($(CHOSEN)) && "$$python" -m venv $(VENV)
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

# What every process imports is compiled once, by one that imports it.
$(COMPILED): $(TRAINS)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import torch._dynamo, torch.distributed.checkpoint'
	@touch $@

demo: $(COMPILED)  ## compile a library scheme, train a byte-level GPT with it on four processes, time it beside 1F1B
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

# What a change usually breaks, in two minutes on two cores: the rules on the text of files, every message, the compiler
# from end to end, the core of the runtime, and some of the properties.
QUICK := $(addprefix tests/test_,$(addsuffix .py,architecture claims closed_types docs)) tests/errors chimera_ir/diagnostics chimera_ir/syntax \
  $(addprefix tests/unit/test_,$(addsuffix .py,cli codegen compilation cost elaborate highlight ir_text library lower \
    picture prediction render report scripts syntax verify)) \
  $(addprefix tests/property/test_,$(addsuffix .py,ir_roundtrip mutations random_schemes syntax_roundtrip)) \
  $(addprefix tests/unit/runtime/,$(addsuffix .py,data/test_feed update/test_flushing update/test_streaming lane/test_lane \
    stage/test_stage test_pipeline))
quick: export PYTHONDONTWRITEBYTECODE =
quick: check  ## the checks, and the tests that a change usually breaks: two minutes
	$(BIN)/pytest $(QUICK) --doctest-modules -m "not slow" --numprocesses=auto --dist=worksteal

# One run for everything. Ranks often wait, for one another and for time to pass: two workers share a core, and each works
# through whole files, as the tests of a file share what they compile. The checks run at the same time, and what they say
# comes in one piece. Without bytecode each of the hundreds of processes would compile the modules again.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(2 * (os.cpu_count() or 2))')
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY)  ## every check and test
	@$(MAKE) --no-print-directory --jobs=4 checked tests

.PHONY: checked tests
checked:
	@log=$$(mktemp); $(MAKE) --no-print-directory check >$$log 2>&1; status=$$?; cat $$log; rm $$log; exit $$status

# Tests write some hundred thousand small files: into memory, where it has room for them.
tests: export TMPDIR := $(or $(TMPDIR),$(shell $(PYTHON) -c 'import shutil; print("/dev/shm" * (shutil.disk_usage("/dev/shm").free > 4 << 30))' 2>/dev/null))
tests: $(COMPILED) browser examples torchtitan typescript
	$(BIN)/pytest tests chimera_ir docs/paper_tables docs/conformance --doctest-modules --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

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
