# The few verbs of this repository. Everything runs in .venv, which the first verb makes.
# PYTHON picks the interpreter (3.11 to 3.13); EXTRA_INDEX= turns the index of CPU builds off.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

# Without a GPU the CPU build of torch will do: it is a tenth of the size. It comes by itself and first, so that an
# index that cannot be reached costs one try and a warning, not one for each dependency.
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
EXTRA_INDEX ?= --extra-index-url https://download.pytorch.org/whl/cpu
endif
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint fmt bench clean

help: ## List the verbs
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Stamps, so that a second run installs nothing; a change of pyproject.toml installs again.
$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "kvstow needs Python 3.11 to 3.13; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --no-deps --retries 1 --timeout 20 $(EXTRA_INDEX) "$(TORCH)"
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(PIP_INSTALL) -e '.[service,cli]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.run

venv: $(VENV)/.dev ## Make .venv with all that development needs

demo: $(VENV)/.run ## Run the service on a generated trace and verify every loaded byte
	$(BIN)/python -m kvstow_service.demo

test: lint ## Lint, type-check and run all tests that need no GPU
	$(BIN)/python -m pytest -m "not gpu" --cov --cov-report=term

lint: $(VENV)/.dev ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: $(VENV)/.dev ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev ## Run the benchmarks
	$(BIN)/python -m bench

clean: ## Remove .venv and all that tools left behind
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
