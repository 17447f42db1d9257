# Everything needs only Python 3.10+, pip and make; each target sets up .venv first, and does nothing twice.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ARGS ?=

.PHONY: train test test-slow check docs help
help:
	@echo "make train      a Llama on the text of this Python installation, dp=2 x tp=2 x pp=2 on 8 CPU processes"
	@echo "make test       the test suite (ARGS='-k name' narrows it)"
	@echo "make test-slow  the tests marked slow too"
	@echo "make docs       the documentation, in site/"
	@echo "make check      format, lint, types, layers and house rules"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Goes on where an earlier run stopped; `rm -r runs/tiny_llama` begins anew.
train: $(READY)
	$(BIN)/python recipes/python_corpus.py
	OMP_NUM_THREADS=1 $(BIN)/python -m lightning_3d fit --config recipes/tiny_llama.yaml \
		$(if $(wildcard runs/tiny_llama/checkpoints/step-*),--ckpt_path last) $(ARGS)

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' $(ARGS)

test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --quiet tests/test_house.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
