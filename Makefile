# Each target sets up what it needs: a virtual environment in .venv, renewed when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHARED ?= ../shared

.PHONY: demo test lint types contracts tests bench clean

demo: $(VENV)/ready
	$(BIN)/servetwin demo --shared $(SHARED)/data/traces

test: lint types contracts tests

lint: $(VENV)/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready-dev
	$(BIN)/mypy

contracts: $(VENV)/ready-dev
	$(BIN)/lint-imports

tests: $(VENV)/ready-dev
	$(BIN)/python -m pytest -q -n auto --dist worksteal

bench: $(VENV)/ready
	$(BIN)/python benchmarks/speed.py --shared $(SHARED)/data/traces

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/ready-dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@ $(VENV)/ready

clean:
	rm -rf $(VENV) demo-results
