# Two commands need nothing before them: `make demo` and `make test`. Each makes .venv if it is not there.

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.complete

.PHONY: setup demo test test-fast test-nightly fuzz lint types check format clean

setup: $(READY)

# .complete is written last. Without it an earlier installation was interrupted, and .venv is made anew.
$(READY): pyproject.toml constraints.txt
	@test -f $(READY) || rm -rf $(VENV)
	@rm -f $(READY)
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/mocokit demo --overwrite

test: $(READY)
	$(BIN)/python -m pytest -n auto -m 'not nightly'

test-fast: $(READY)
	$(BIN)/python -m pytest -n auto -m 'not slow and not nightly'

test-nightly: $(READY)
	$(BIN)/python -m pytest -m nightly

# Files changed at random for SECONDS for each reader: `make fuzz SECONDS=450`; SEEDS names a folder of real pictures.
SECONDS ?= 60
SEEDS   ?=
fuzz: $(READY)
	$(BIN)/python -m attacks.fuzz --seconds $(SECONDS) $(if $(SEEDS),--seeds $(SEEDS))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

check: lint types test

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
