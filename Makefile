# `make test`, `make quick` and `make demo` need only python3 (3.11 or later): they create .venv and install what is
# missing. `make test` runs everything; `make quick` is what one runs while working.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SCRATCH := build/wheel

# How many processes run tests. Each uses one thread, so one for each core.
JOBS ?= auto
# Compiled files are written even where the environment forbids it: tests start processes that import the library.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(JOBS) --maxprocesses 8

.PHONY: setup test quick zoo checks lint format types layers changelog tests docs wheel demo bench clean

# The checks take a core each, so two at a time; the output of each stays together where this make can do that.
test: setup
	$(MAKE) --jobs 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) checks
	$(MAKE) tests

checks: types lint layers changelog docs wheel

# What `make test` leaves out because it shows the same once more: models of the zoo compiled under every rule, and such.
zoo: setup
	$(PYTEST) -m long tests

quick: setup lint
	$(PYTEST) --quiet -m "not slow"

setup: $(READY)

# torch goes first, so that everything after it sees the pinned version in place. `--group` needs pip 25.1.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --group dev
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports

# Renders the pending fragments without writing anything; a misnamed fragment fails.
changelog: setup
	$(BIN)/towncrier build --draft --version next

tests: setup
	$(PYTEST)

docs: setup
	$(BIN)/python -m sphinx -E -W -n --keep-going -b html docs docs/_build/html

# Unpacks the built wheel alone in an empty directory and imports it there, with the environment's torch.
wheel: setup
	rm -rf $(SCRATCH)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(SCRATCH) .
	$(BIN)/python -m pip install --quiet --no-deps --target $(SCRATCH)/unpacked $(SCRATCH)/recollect-*.whl
	cd $(SCRATCH)/unpacked && PYTHONPATH=. $(CURDIR)/$(BIN)/python -c "\
	import pathlib, recollect, recollect.compat; \
	here = pathlib.Path(recollect.__file__).resolve().parent; \
	assert here == pathlib.Path('recollect').resolve(), f'imported {here}, not the wheel'; \
	assert (here / 'py.typed').is_file(), 'the wheel lacks py.typed'"

demo: setup
	mkdir -p build
	$(BIN)/recollect demo --html build/demo.html

bench: setup
	mkdir -p build
	$(BIN)/recollect bench --quick --device cpu --results build/bench.json

clean:
	rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests docs benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
