# The two commands of the README, and what CI runs. Everything happens in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
KILLS  ?= 20

.PHONY: install quickstart test test-all lint clean

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

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) *.egg-info build
