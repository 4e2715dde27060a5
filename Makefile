# Everything runs in .venv, which `make setup` builds from pyproject.toml and the tested versions in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOWEST := .venv-lowest
# processes that share the fast tests
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-models test-lowest fuzz bench lint format clean

help:
	@echo "make setup        create .venv with everything (once, a few minutes)"
	@echo "make demo         train a small private model and print what it cost"
	@echo "make test         lint, format check, types, fast tests"
	@echo "make test-slow    the slow tests and those that need real data sets"
	@echo "make test-models  models of transformers, timm, peft and diffusers, which it installs"
	@echo "make test-lowest  the fast tests with the lowest versions that pyproject.toml allows, in .venv-lowest"
	@echo "make fuzz         thousands of odd command lines and damaged files (about a quarter of an hour)"
	@echo "make bench        every script in benchmarks/"
	@echo "make lint         ruff, mypy and who may import whom"
	@echo "make format       let ruff format and fix the code"
	@echo "make clean        remove environments, caches and build outputs"

setup: $(STAMP)
	@:

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing dphero into $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[all]'
	@touch $@
	@echo "Done."

demo: setup
	@$(BIN)/dphero demo

test: lint
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

test-slow: setup
	@$(BIN)/python -m pytest -q -m "slow or realdata"

# timm alone: the torchvision that it asks for may bring another torch along, and its models do not need it
test-models: setup
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[all,models]'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --no-deps timm
	@$(BIN)/python -m pytest -q -m models

test-lowest:
	@test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	@$(LOWEST)/bin/python -m pip install -qq --disable-pip-version-check -c constraints-lowest.txt -e '.[demo,experiments,dev]'
	@$(LOWEST)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal

fuzz: setup
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.fuzz

bench: setup
	@set -e; for script in $(sort $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))); do \
		echo "== $$script"; $(BIN)/python $$script; \
	done

lint: setup
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-cache > /dev/null || $(BIN)/lint-imports --no-cache

format: setup
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

clean:
	@rm -rf $(VENV) $(LOWEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
