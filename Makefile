# Two commands on a machine with Python >= 3.10, make and a C compiler:
#   make demo    train the paper's six optimizers on real data and write a page
#   make test    lint, type-check and test, as CI does
# Both make .venv and install what they need into it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PACKAGES := src tests

.PHONY: demo test lint types install clean

demo: $(INSTALLED)
	$(BIN)/tam demo

test: lint types
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/ruff format --check $(PACKAGES)

types: $(INSTALLED)
	$(BIN)/mypy

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
