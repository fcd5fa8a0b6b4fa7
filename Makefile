# make fuzz: set up, then fuzz the kernel on serving batches for a minute.
# make test: set up, then run the tests.      make lint: format, lint and type checks.
#
# Set-up makes a virtual environment in .venv. A torch (and triton) that $(PYTHON) already has is used as it is,
# never replaced; otherwise the pinned ones are installed.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRITON ?= triton==3.9.0
TIME ?= 60s
PYTEST_ARGS ?=

BIN := $(VENV)/bin
TYPES := $(VENV)/types

.PHONY: setup fuzz test lint format clean
.DELETE_ON_ERROR:

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml Makefile
	@PYTHON='$(PYTHON)' VENV='$(VENV)' TORCH='$(TORCH)' TRITON='$(TRITON)' sh tests/setup.sh
	@touch $@

fuzz: setup
	$(BIN)/swa-decode-meta fuzz --profile serving --time $(TIME)

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@# mypy knows no import hooks: show it the packages under their import names.
	@mkdir -p $(TYPES)/swa_decode_meta
	@for part in spec oracle kernel fuzz; do ln -sfn '$(CURDIR)'/$$part $(TYPES)/swa_decode_meta/$$part; done
	MYPYPATH=$(TYPES) $(BIN)/mypy -p swa_decode_meta.spec -p swa_decode_meta.oracle -p swa_decode_meta.kernel -p swa_decode_meta.fuzz

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
