# make train [TEXT=file.txt]   train a small GPT with flash_attention, on the CPU, in under three minutes
# make test                    every test
# make lint                    style and types
# make bench                   naive against flash attention: time and memory
# Each creates .venv on first use and installs what it needs. PYTHON=python3.12 picks another Python.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: train test lint bench clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: $(BIN)/python setup.py requirements.txt
	$(PIP) --editable '.[plot]'
	@touch $@

$(VENV)/.test: $(BIN)/python setup.py requirements.txt
	$(PIP) --editable '.[plot,test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) --editable '.[plot,test,lint]'
	@touch $@

train: $(VENV)/.train
	$(BIN)/python project/train_gpt.py $(if $(TEXT),--text '$(TEXT)') $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)
	NUMBA_ENABLE_CUDASIM=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m simulator $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.train
	$(BIN)/python project/bench_attention.py $(ARGS)

clean:
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
