# Commands for contributors. `make train` and `make test` work in a fresh clone; they create .venv first.
#
#   make setup CONSTRAINTS=     without the exact pins (the newest torch that your index has)
#   make train ARGS="..."       arguments for `fullshard train`; ARGS works for test, bench and gpu too

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
ARGS ?=
# Number of test files that run at the same time.
WORKERS ?= 2
# Version of torch for `make test-torch`.
TORCH ?=
# The engine of `make train`: torch, or jax.
BACKEND ?= torch
TORCH_VENV = .venv-torch-$(TORCH)
# Python for `make gpu`, whose torch has CUDA.
GPU_PYTHON ?= $(or $(wildcard $(BIN)/python),python3)
# The Python version and the folder of `make gpu-wheels`.
GPU_PYTHON_VERSION ?= 3.12
WHEELS ?= build/wheels
# Device of `make gpu`: cuda, or cpu to test the steps themselves.
DEVICE ?= cuda

# Candidates for the Python of .venv, of which the first usable one is taken; 3.11 is first, because
# the pins were resolved on it.
CANDIDATES := python3.11 python3 python3.12 python3.13 python3.14
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	$(if $(strip $(CONSTRAINTS)),--constraint $(CONSTRAINTS))
PYTEST = $(BIN)/python -m pytest
# A file's tests run in one process, because many share fixtures. tests/conftest.py orders files.
PYTEST_PARALLEL = $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder
RUFF_PATHS = $(wildcard src tests tools benchmarks examples docs)
# Without the tests, which contain misspellings on purpose.
SPELLED = $(wildcard src tools benchmarks examples docs *.md) Makefile

.PHONY: help setup train test test-long test-all test-tutorials test-peers test-slow test-torch test-wheel lint format bench bench-calibrate bench-comm bench-compile bench-copies bench-corpus bench-disk-step bench-exact bench-gpu bench-head-loss bench-host bench-io bench-jax bench-limits bench-memory bench-mesh bench-nvme bench-scale bench-start bench-overlap bench-planner bench-time chaos distill-study long-parity gpu gpu-wheels docs screenshots clean

help:
	@echo "make setup            install what tests and lint need into $(VENV)"
	@echo "make train            train a small model on two local ranks; ARGS=\"CONFIG.yaml key=value\","
	@echo "                      BACKEND=jax runs it on XLA"
	@echo "make test             run the tests, without long, slow and GPU tests"
	@echo "make test-long        run the long tests: whole runs of tens of seconds each"
	@echo "make test-all         run test and test-long in one session, as CI does"
	@echo "make test-peers       compare with other libraries, installed from the package index"
	@echo "make test-slow        run the slow tests"
	@echo "make test-tutorials   run examples/ to the end, each on two ranks"
	@echo "make test-wheel       install the wheel into an empty environment and train there"
	@echo "make test-torch       test the engine with another torch (TORCH=x), in .venv-torch-x"
	@echo "make gpu              check the engine on a GPU step by step; DEVICE=cpu tries the steps"
	@echo "make gpu-wheels       download the wheels that make gpu needs on a machine without an index"
	@echo "make lint             check format, style, types, imports, sizes, names in docs, links"
	@echo "make format           format the code and fix what ruff can"
	@echo "make bench            time a training step against FSDP2, FSDP1 and DDP"
	@echo "make bench-calibrate  measure this machine for the forecasts of fullshard plan"
	@echo "make bench-comm       time each transport against a memory copy"
	@echo "make bench-compile    time compiled blocks against FSDP2 and count recompiles"
	@echo "make bench-copies     count bytes that copies of a step read and write, against FSDP2"
	@echo "make bench-corpus     tokenize a large corpus: memory per process, time, cost of a kill"
	@echo "make bench-disk-step  time a step with state on disk against the disk (needs root, cgroups)"
	@echo "make bench-exact      compare planned XLA memory with the compiler's, for eight Llamas"
	@echo "make bench-gpu        time blocks of Llama 3 8B on one GPU; GPU_PYTHON is a Python with CUDA"
	@echo "make bench-head-loss  compare the chunked head loss with those of torch, TRL and Liger"
	@echo "make bench-host       measure host time per unit against FSDP2"
	@echo "make bench-io         time saves and loads against the disk and torch's checkpoints"
	@echo "make bench-jax        time JAX on two processes against one and against XLA's partitioner"
	@echo "make bench-limits     compare runs under memory limits with their plans (needs root, cgroups)"
	@echo "make bench-memory     compare planned and measured memory of ten architectures"
	@echo "make bench-mesh       time steps with a tensor or expert axis against transformers"
	@echo "make bench-nvme       time state on disk against DeepSpeed (must be installed)"
	@echo "make bench-overlap    measure how much time of a slow network overlaps with compute"
	@echo "make bench-planner    compare forecasts with published runs and ten runs on this machine"
	@echo "make bench-scale      measure planning, bookkeeping, groups and saves by world size"
	@echo "make bench-start      time from the command to the first step"
	@echo "make bench-time       compare those ten runs with the planned step times"
	@echo "make chaos            kill ranks at random moments of training and saving, 200 times"
	@echo "make distill-study    compare students with and without a teacher: 3 rates, 3 seeds"
	@echo "make long-parity      compare a thousand steps of DDP, FSDP2 and fullshard in one plot"
	@echo "make docs             build the documentation into docs/_build/html"
	@echo "make screenshots      update images of plan and run pages in the docs (RUN=runs/train)"
	@echo "make clean            remove build artefacts and caches, not $(VENV) and runs"

# ---- environments: a stamp file each, so that they are made once ------------------------------------

$(BIN)/python:
	@for candidate in $(CANDIDATES); do \
		if "$$candidate" -c '$(USABLE)' 2>/dev/null; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "expected a Python >= 3.11 with venv among: $(CANDIDATES). Install one," >&2; \
		echo "or make the environment yourself: /path/to/python -m venv $(VENV)" >&2; exit 1; \
	fi; \
	echo "making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)

$(VENV)/.stamp-train: pyproject.toml $(wildcard constraints.txt) | $(BIN)/python
	@echo "installing fullshard with transformers and tokenizers into $(VENV) (about half a minute)"
	@$(PIP_INSTALL) --editable '.[hf]'
	@touch $@

$(VENV)/.stamp-jax: pyproject.toml $(wildcard constraints.txt) | $(VENV)/.stamp-train
	@echo "installing jax into $(VENV)"
	@$(PIP_INSTALL) --editable '.[hf,jax]'
	@touch $@

$(VENV)/.stamp-setup: pyproject.toml $(wildcard constraints.txt) | $(BIN)/python
	@echo "installing fullshard with what tests and lint need into $(VENV) (about a minute)"
	@$(PIP_INSTALL) --editable '.[test,lint]'
	@touch $@ $(VENV)/.stamp-train $(VENV)/.stamp-jax

$(VENV)/.stamp-docs: pyproject.toml $(wildcard constraints.txt) | $(BIN)/python
	@echo "installing what the documentation needs into $(VENV)"
	@$(PIP_INSTALL) --editable '.[docs]'
	@touch $@

# Another torch is tested with the other pins.
$(VENV)/.stamp-torch: pyproject.toml $(wildcard constraints.txt) | $(BIN)/python
	@echo "installing torch $(TORCH) and what tests need into $(VENV)"
	@grep -v '^torch==' constraints.txt > $(CONSTRAINTS)
	@$(PIP_INSTALL) 'torch==$(TORCH)' --editable '.[test]'
	@touch $@

setup: $(VENV)/.stamp-setup

# ---- commands -----------------------------------------------------------------------------------------

train: $(VENV)/.stamp-$(if $(filter jax,$(BACKEND)),jax,train)
	@$(BIN)/fullshard train $(ARGS) $(if $(filter torch,$(BACKEND)),,backend=$(BACKEND))

test: $(VENV)/.stamp-setup
	$(PYTEST_PARALLEL) -m "not long and not slow and not gpu and not peers" $(ARGS)

test-long: $(VENV)/.stamp-setup
	$(PYTEST_PARALLEL) --hypothesis-profile long \
		-m "(long or hypothesis) and not slow and not gpu and not peers" $(ARGS)

test-all: $(VENV)/.stamp-setup
	$(PYTEST_PARALLEL) --hypothesis-profile long -m "not slow and not gpu and not peers" $(ARGS)

# Runs each file of examples/ on two ranks, as its first lines say.
test-tutorials: $(VENV)/.stamp-setup
	$(PYTEST) -m "not gpu" --timeout 600 tests/train/test_examples.py $(ARGS)

test-slow: $(VENV)/.stamp-setup
	$(PYTEST) -m "slow and not gpu and not peers" --timeout 1200 $(ARGS)

# Tests that install other libraries from the package index; they are skipped if that fails.
test-peers: $(VENV)/.stamp-setup
	$(PYTEST) -m "peers and not gpu" --timeout 1200 -rs $(ARGS)

# Installs the wheel into a new environment and trains there, without the checkout.
test-wheel: | $(BIN)/python
	@rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(BIN)/python -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet --disable-pip-version-check \
		$(if $(strip $(CONSTRAINTS)),--constraint $(CONSTRAINTS)) "$$(echo build/wheel/*.whl)[hf]"
	cd build/wheel && venv/bin/fullshard train training.max_steps=10 && \
		venv/bin/fullshard generate runs/train --prompt "The" && rm -rf venv

test-torch:
	@if [ -z "$(TORCH)" ]; then \
		echo "make test-torch: expected a version, as in make test-torch TORCH=2.13.0" >&2; exit 1; fi
	@$(MAKE) --no-print-directory VENV=$(TORCH_VENV) CONSTRAINTS=$(TORCH_VENV)/constraints.txt \
		$(TORCH_VENV)/.stamp-torch
	@$(TORCH_VENV)/bin/python -c 'import torch; print("torch", torch.__version__)'
	$(TORCH_VENV)/bin/python -m pytest -m "not slow and not gpu and not peers" \
		-n $(WORKERS) --dist loadfile tests/engine tests/pure/engine $(ARGS)

bench: $(VENV)/.stamp-setup
	$(BIN)/fullshard bench step $(ARGS)

bench-calibrate bench-comm bench-io: bench-%: $(VENV)/.stamp-setup
	$(BIN)/fullshard bench $* $(ARGS)

bench-compile bench-copies bench-corpus bench-disk-step bench-exact bench-head-loss bench-host bench-jax bench-limits bench-memory bench-mesh bench-nvme bench-overlap bench-planner bench-scale bench-start bench-time: bench-%: $(VENV)/.stamp-setup
	$(BIN)/python -m benchmarks.$(patsubst jax,xla,$(patsubst time,times,$(subst -,_,$*))) $(ARGS)

bench-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

chaos: $(VENV)/.stamp-setup
	$(BIN)/python tools/chaos.py $(ARGS)

distill-study: $(VENV)/.stamp-setup
	$(BIN)/python -m benchmarks.distill_study $(ARGS)

long-parity: $(VENV)/.stamp-setup
	$(BIN)/python -m benchmarks.long_parity $(ARGS)

# Wheels of the dependencies except torch and numpy, for a GPU machine without a package index.
gpu-wheels: | $(BIN)/python
	@rm -rf $(WHEELS)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --dest $(WHEELS) \
		--only-binary=:all: --python-version $(GPU_PYTHON_VERSION) --platform manylinux_2_28_x86_64 \
		--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		Jinja2 omegaconf psutil pydantic PyYAML rich safetensors typer xxhash

# First installs the wheels, if they are present and needed, into build/gpu-packages.
gpu:
	@if [ -d $(WHEELS) ] && ! $(GPU_PYTHON) -c 'import pydantic, psutil, safetensors, xxhash' 2>/dev/null; then \
		$(GPU_PYTHON) -m pip install --quiet --upgrade --no-index --find-links $(WHEELS) \
			--target build/gpu-packages Jinja2 omegaconf psutil pydantic PyYAML rich safetensors typer xxhash; fi
	PYTHONPATH=build/gpu-packages$${PYTHONPATH:+:$$PYTHONPATH} \
		$(GPU_PYTHON) tests/gpu/run.py --device $(DEVICE) $(ARGS)

# All checks run, even if an earlier one fails.
lint: $(VENV)/.stamp-setup
	@failed=""; \
	check() { echo "== $$1"; shift; "$$@" || failed="$$failed $$name"; }; \
	name=format;      check "ruff format" $(BIN)/ruff format --check $(RUFF_PATHS); \
	name=style;       check "ruff check" $(BIN)/ruff check $(RUFF_PATHS); \
	name=types;       check "pyright" $(BIN)/pyright; \
	name=arrows;      check "import-linter" $(BIN)/lint-imports --no-logo; \
	name=sizes;       check "sizes" $(BIN)/python tools/check_sizes.py; \
	name=collectives; check "collective calls" $(BIN)/python tools/check_collectives.py; \
	name=names;       check "names in the documentation" $(BIN)/python tools/check_docs.py; \
	name=repository;  check "files, links and declarations" $(BIN)/python tools/check_repository.py; \
	name=tools;       check "tests of these checks" $(PYTEST) -q tools; \
	name=spelling;    check "codespell" $(BIN)/codespell $(SPELLED); \
	if [ -n "$$failed" ]; then echo "make lint: failed:$$failed" >&2; exit 1; fi; \
	echo "make lint: all checks passed"

format: $(VENV)/.stamp-setup
	$(BIN)/ruff format $(RUFF_PATHS)
	$(BIN)/ruff check --fix $(RUFF_PATHS)

docs: $(VENV)/.stamp-docs
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

screenshots: $(VENV)/.stamp-setup
	$(BIN)/python tools/screenshots.py $(or $(RUN),runs/train)

clean:
	rm -rf build dist docs/_build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
