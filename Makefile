# Every target makes what it needs; `make demo` and `make test` are enough on a fresh machine.
#
#   PYTHON  the interpreter that the environment is built from, 3.11 or newer
#   TORCH   what pip installs as PyTorch, remembered by the environment. For another device:
#           make setup TORCH="torch==2.13.0 --index-url ADDRESS", where ADDRESS is the one that
#           PyTorch's own installation page names for it

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= $(or $(shell cat .venv/torch 2>/dev/null),-r requirements/torch.txt)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
RUN := .venv/bin/python
# One process for each core; a worker takes tests of another when it has none left.
SPREAD := -n auto --maxprocesses 8 --dist worksteal
PINS := requirements/torch.txt requirements/lock.txt

# A choice of TORCH that differs from the environment's builds it anew.
ifneq ($(origin TORCH),file)
ifneq ($(TORCH),$(shell cat .venv/torch 2>/dev/null))
.venv/ready: rebuild
endif
endif

.PHONY: help setup setup-slurm setup-tensorboard demo test test-slow test-faults lint bench lock \
	clean rebuild

help:
	@echo "make setup        build .venv from the pinned files; setup-slurm and setup-tensorboard"
	@echo "                  add what those need"
	@echo "make demo         train all stages in miniature, then a table: minutes on 2 cores"
	@echo "make test         the tests; test-slow and test-faults run those that take longer"
	@echo "make lint         ruff, mypy and the direction of imports"
	@echo "make bench        time and memory of banded attention"
	@echo "make lock         write the pinned files anew from pyproject.toml"
	@echo "make clean        remove .venv and caches; runs/ stays"

setup: .venv/ready

.venv/ready: $(PINS)
	@command -v "$(PYTHON)" >/dev/null || { echo "make: PYTHON=$(PYTHON): not found;" \
		"expected Python 3.11 or newer, for example make setup PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: PYTHON=$(PYTHON) is $$("$(PYTHON)" -V 2>&1); expected Python 3.11 or newer," \
		"for example make setup PYTHON=python3.12" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear .venv
	@printf '%s\n' '$(TORCH)' > .venv/torch
	$(RUN) -m pip install --quiet $(TORCH)
	$(RUN) -m pip install --quiet --no-deps --require-hashes -r requirements/lock.txt
	$(RUN) -m pip check
	touch $@

# The extras lie on top of the environment, each behind its own stamp.
setup-slurm setup-tensorboard: setup-%: .venv/ready-%

.venv/ready-%: requirements/%.txt .venv/ready
	$(RUN) -m pip install --quiet --no-deps --require-hashes -r $<
	$(RUN) -m pip check
	touch $@

demo: .venv/ready
	$(RUN) train.py experiment=demo stage=all
	$(RUN) -m lm.measuring.compressors demo

test: .venv/ready
	$(RUN) -m pytest $(SPREAD)

test-slow: .venv/ready
	$(RUN) -m pytest -m slow --timeout 3600

test-faults: .venv/ready
	$(RUN) -m pytest $(SPREAD) -m faults --timeout 3600

lint: .venv/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	.venv/bin/lint-imports --no-logo

bench: .venv/ready
	$(RUN) -m kernels.bench

lock: .venv/ready
	$(RUN) scripts/lock.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
