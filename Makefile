# On a machine with Python >= 3.10, make and a C compiler (for the CPU kernel; without one torch's operations serve):
#   make demo     train the paper's six optimizers on real data and write a page
#   make test     lint, type-check, build the site and test, as CI does
#   make docs     build the site of docs/ into site/; a dead link is an error
#   make docs-serve  show the site at http://127.0.0.1:8000 while you write
#   make results  write the pages of results/ from the packed results
#   make theory   write the tables and pictures of docs/how-it-works/theory.md
#   make findings write docs/results/claims/ and the pages of docs/results/ that have a template
#   make notebook run examples/tour.ipynb and store its outputs
#   make bench    time the step against torch's optimizers, on the GPU if there is one
#   make words    list the files with stumbling words and long sentences
#   make dist     build the sdist and the wheel, and check both, in 2 to 6 minutes
#   make compat   test with the oldest and the newest torch, in .compat (gigabytes)
#   make sanitize test the CPU kernel with gcc's address and undefined-behaviour sanitizers
# Each makes .venv (docs: .venv-docs, compat: .compat) and installs what it needs into it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CODE := src tests benchmarks docs examples results scripts setup.py
# pip shows its progress on a terminal. A log gets warnings and errors alone.
PROGRESS := $(shell test -t 2 || echo --quiet)
INSTALL := -m pip install $(PROGRESS) --constraint "$(CURDIR)/constraints.txt"
PIP := $(BIN)/python $(INSTALL)
SOURCES := pyproject.toml constraints.txt setup.py $(wildcard src/tam/step/fused/cpu*.[ch]) \
	src/tam/step/fused/columns.py src/tam/sharding/sums.py

.PHONY: demo test docs docs-serve lint types results findings theory notebook words bench dist compat compat-oldest compat-newest sanitize install clean

demo: $(VENV)/.demo
	$(BIN)/tam demo

test: lint types docs
	$(BIN)/python -m pytest
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/step/fused/test_kernels.py tests/recorder/test_cuda.py

# The variable silences a banner about the theme's successor.
docs: .venv-docs/.made
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

docs-serve: .venv-docs/.made
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve

lint: $(VENV)/.dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.dev
	$(BIN)/mypy

results: $(VENV)/.dev
	$(BIN)/python results/update.py

findings: $(VENV)/.dev
	$(BIN)/python results/findings.py

theory: $(VENV)/.dev
	$(BIN)/python docs/how-it-works/figures/theory.py
	$(BIN)/python docs/how-it-works/figures/noise.py

# Without times and with joined lines, the stored outputs change only if the results do.
EXECUTE := import nbclient, nbformat, sys; path = sys.argv[1]; notebook = nbformat.read(path, 4); \
	nbclient.NotebookClient(notebook, timeout=600, record_timing=False, coalesce_streams=True).execute(); \
	nbformat.write(notebook, path)

notebook: $(VENV)/.dev
	$(BIN)/python -c '$(EXECUTE)' examples/tour.ipynb

words:
	$(PYTHON) docs/words.py

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/step.py --out benchmarks/results/latest.json

DIST := build/dist
BUILD := $(DIST)/tools/bin/python -m build --quiet
CHECK := $(DIST)/tools/bin/python scripts/check_dist.py
EMPTY := cd $(DIST) && env -u PYTHONPATH PATH="$(CURDIR)/$(DIST)/empty/bin" CC=false python
DIST_TESTS := tests/test_package.py tests/test_reference.py tests/test_readme.py tests/lab/test_findings.py

# The wheel is built from the sdist, once with the kernel and once as on a machine without a compiler.
dist: $(VENV)/.dev
	rm -rf dist $(DIST)
	$(PYTHON) -m venv $(DIST)/tools
	$(DIST)/tools/bin/python $(INSTALL) build twine
	$(BUILD)
	$(DIST)/tools/bin/python -m twine check --strict dist/*
	$(CHECK) dist/*.tar.gz dist/*.whl
	mkdir $(DIST)/source && tar -xzf dist/*.tar.gz -C $(DIST)/source --strip-components 1
	CC=false $(BUILD) --wheel --outdir $(DIST)/pure $(DIST)/source
	$(CHECK) dist/*.tar.gz $(DIST)/pure/*.whl
	$(PYTHON) -m venv $(DIST)/empty
	$(EMPTY) $(INSTALL) ../../dist/*.whl
	$(EMPTY) -I source/scripts/take_step.py
	$(EMPTY) $(INSTALL) --no-deps --force-reinstall pure/*.whl
	$(EMPTY) -I source/scripts/take_step.py
	cd $(DIST)/source && "$(abspath $(BIN))/python" -m pytest --quiet --collect-only > ../collected.txt \
		|| { tail ../collected.txt; exit 1; }
	cd $(DIST)/source && "$(abspath $(BIN))/python" -m pytest --quiet $(DIST_TESTS)

# Python 3.10 is the oldest we support; a python3.10 may exist and not run (pyenv's shims).
OLDEST_PYTHON ?= $(shell python3.10 -c 'import sys; print(sys.executable)' 2>/dev/null || echo $(PYTHON))
NEWEST_PYTHON ?= $(PYTHON)
COMPAT_TESTS := tests/optimizers tests/step tests/recorder tests/integrations \
	tests/sharding/test_dtensor.py tests/sharding/test_checkpoint.py \
	tests/test_functional.py tests/switching
COMPAT_VERSIONS := import platform as p, torch, triton; \
	print("Python", p.python_version(), "torch", torch.__version__, "triton", triton.__version__)

compat: compat-oldest compat-newest

compat-oldest: COMPAT = $(OLDEST_PYTHON) -m venv .compat/oldest
# The interpreter of its triton fails with NumPy 2.4.
compat-oldest: COMPAT_TORCH = torch==2.6.0 'numpy<2.4'
compat-newest: COMPAT = $(NEWEST_PYTHON) -m venv .compat/newest
compat-newest: COMPAT_TORCH = torch
compat-oldest compat-newest: compat-%:
	test -x .compat/$*/bin/python || $(COMPAT)
	@echo "Installing into .compat/$*. The first time, this takes minutes and gigabytes."
	.compat/$*/bin/python -m pip install $(PROGRESS) --upgrade --upgrade-strategy eager \
		$(COMPAT_TORCH) --editable '.[demo,lightning,record,timm,transformers]' hypothesis pytest
	@.compat/$*/bin/python -c '$(COMPAT_VERSIONS)'
	.compat/$*/bin/python -m pytest -q $(COMPAT_TESTS)
	TRITON_INTERPRET=1 .compat/$*/bin/python -m pytest -q tests/step/fused/test_kernels.py tests/recorder/test_cuda.py

# In a copy of the package. Python itself is not instrumented, so the sanitizer's library is loaded
# first, and libstdc++ with it: else torch's exceptions end the process.
SANITIZED := build/sanitize
sanitize: $(VENV)/.dev
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -R src/tam $(SANITIZED)
	rm -f $(SANITIZED)/tam/step/fused/_cpu*.so
	$(BIN)/python -c 'from tam.step.fused.columns import c_header; print(c_header())' \
		> $(SANITIZED)/tam/step/fused/columns.h
	$(CC) -O2 -g -std=c11 -fopenmp -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all \
		-shared -fPIC $(SANITIZED)/tam/step/fused/cpu.c -o $(SANITIZED)/tam/step/fused/_cpu.so -lm
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so.6)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH="$(CURDIR)/$(SANITIZED)" \
		$(BIN)/python -m pytest -o pythonpath=. --capture=sys tests/step tests/optimizers/test_moving_tensors.py

CPU_TORCH := On Linux without an NVIDIA GPU, \
	PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves 4 GB.

install: $(VENV)/.dev

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.made $(SOURCES)
	@echo "Installing into $(VENV). The first time, this takes 1 to 6 minutes and 1 to 5 GB, mostly torch."
	@echo "$(CPU_TORCH)"
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.made $(SOURCES)
	@echo "Installing into $(VENV). The first time, this takes 2 to 10 minutes and 4 to 8 GB."
	@echo "$(CPU_TORCH)"
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.demo

.venv-docs/.made: docs/requirements.txt constraints.txt
	$(PYTHON) -m venv .venv-docs
	@echo "Installing into .venv-docs. The first time, this takes 20 seconds or more."
	.venv-docs/bin/python $(INSTALL) --requirement docs/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-docs .compat build dist site src/*.egg-info src/tam/step/fused/_cpu*.so .pytest_cache .mypy_cache .ruff_cache
	rm -f tam-demo.html
