.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
PYTEST_ARGS ?=
# processes that share the tests; 0 is this one alone, where a debugger works and a few tests start sooner
WORKERS ?= $(if $(PYTEST_ARGS),0,2)
BENCH_ARGS ?=
CHAOS_ARGS ?= --rounds 1000

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
NOTEBOOKS = $(wildcard notebooks/*.py)

.PHONY: help demo test lint bench chaos cluster notebooks clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.demo ## Carry a real table into a training loop, by both routes
	@$(BIN)/bridge demo

test: .venv/.dev ## Run the tests; PYTEST_ARGS="tests/unit -k config" runs some
	@$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: .venv/.dev ## Check style, format, types, the direction of imports and spelling
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/codespell

bench: .venv/.dev ## Measure; BENCH_ARGS names the questions
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

chaos: .venv/.dev ## Kill what writes, a thousand times; CHAOS_ARGS="--rounds 50 --on-volume"
	@$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

cluster: .venv/.dev ## Start a standalone Spark cluster with a Connect server on loopback
	@$(BIN)/python -m tests.cluster

notebooks: .venv/.dev ## Bring the notebooks in line with their text form and execute them
	@$(BIN)/jupytext --quiet --update --to ipynb $(NOTEBOOKS)
	@$(BIN)/python -m pytest tests/notebooks

clean: ## Remove the environment and everything built
	rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: each names what is installed in .venv. What they need is in pyproject.toml, at the versions of constraints.txt.

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "bridge needs Python 3.11 or newer: make PYTHON=...")'
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.torch: constraints.txt | .venv/.created
	@echo "installing torch (about a minute the first time)"
	@$(PIP) install $$(grep '^torch==' constraints.txt)
	@touch $@

.venv/.demo: pyproject.toml constraints.txt .venv/.torch
	@echo "installing bridge with the embedded engine and Apache Spark (about 2 minutes the first time)"
	@$(PIP) install -c constraints.txt -e ".[spark,torch,demo]"
	@touch $@

.venv/.dev: pyproject.toml constraints.txt .venv/.torch
	@echo "installing bridge, both engines, and what tests and checks need (about 2 minutes the first time)"
	@$(PIP) install -c constraints.txt -e ".[spark,torch,demo,dev]"
	@touch .venv/.demo $@
