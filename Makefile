# Everything runs in .venv, which `make setup` builds from pyproject.toml and the tested versions in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOWEST := .venv-lowest
# processes that share the fast tests
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup browser demo test test-slow test-models test-lowest fuzz bench lint format clean

help:
	@echo "make setup        create .venv with everything (once, a few minutes)"
	@echo "make browser      install Debian's chromium, if allowed to: reports are tested in it (part of make setup)"
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
	-@$(MAKE) -s browser
	@echo "Done."

# Reports are tested in a real browser: Debian's, where it can be had without asking anybody. Else those tests are skipped.
browser:
	@command -v chromium chromium-browser google-chrome > /dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get > /dev/null && echo "Installing chromium ..." && \
		{ timeout 300 apt-get install -y -qq chromium || \
		{ timeout 120 apt-get update -qq && timeout 300 apt-get install -y -qq chromium; }; } \
		> $(VENV)/chromium.log 2>&1 < /dev/null; } || \
		echo "There is no chromium, so reports are not tested in a browser (apt-get install chromium)."

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
