# On a machine with Python >= 3.10, make and a C compiler (for the CPU kernel; without one torch's operations serve):
#   make demo     train the paper's six optimizers on real data and write a page
#   make test     lint, type-check and test, as CI does
#   make bench    time the step against torch's optimizers, on the GPU if there is one
# Each makes .venv and installs what it needs into it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CODE := src tests benchmarks examples setup.py
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
SOURCES := pyproject.toml constraints.txt setup.py $(wildcard src/tam/kernels/native*.[ch])

.PHONY: demo test lint types bench install clean

demo: $(VENV)/.demo
	$(BIN)/tam demo

test: lint types
	$(BIN)/python -m pytest
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/test_triton.py tests/recording/test_cuda.py

lint: $(VENV)/.dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/step.py --out benchmarks/results/latest.json

install: $(VENV)/.dev

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.made $(SOURCES)
	@echo "installing into $(VENV); the first time this takes a minute or more"
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.made $(SOURCES)
	@echo "installing into $(VENV); the first time this takes a minute or more"
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/tam/kernels/_native*.so .pytest_cache .mypy_cache .ruff_cache
	rm -f tam-demo.html
