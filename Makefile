# make fuzz: set up, then fuzz the kernel on serving batches for a minute.
# make test: set up, then run the tests.      make lint: format, lint and type checks.
# make test-vllm: install vLLM 0.33.0, 10 GB, and hold `build` to it.
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

.PHONY: setup fuzz test test-vllm lint format clean
.DELETE_ON_ERROR:

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml Makefile
	@PYTHON='$(PYTHON)' VENV='$(VENV)' TORCH='$(TORCH)' TRITON='$(TRITON)' sh tests/setup.sh
	@touch $@

fuzz: setup
	$(BIN)/swa-decode-meta fuzz --profile serving --time $(TIME)

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

# Another environment, of about 10 GB: vLLM brings a torch and a triton of its own.
VLLM_VENV ?= .venv-vllm

test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m pytest tests/test_vllm.py $(PYTEST_ARGS)

$(VLLM_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install -q vllm==0.33.0 'setuptools>=77' click hypothesis pytest
	$(VLLM_VENV)/bin/pip install -q --no-deps --no-build-isolation -e .
	@touch $@

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
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
