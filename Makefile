# The two commands of the README, and what CI runs. Everything happens in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
KILLS  ?= 20
SEED   ?= 0

.PHONY: install quickstart test test-all chaos lint clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: install
	$(BIN)/rollout run configs/quickstart.yaml

test: install
	$(BIN)/pytest -q -m 'not slow'

test-all: install
	$(BIN)/pytest -q

# Kills a run KILLS times at random moments, resumes it, and counts what was lost.
chaos: install
	$(BIN)/python -m tests.chaos.killer --kills $(KILLS) --seed $(SEED)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) *.egg-info build
