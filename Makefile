# Two commands for everybody: `make run` and `make test`. Both set up .venv once; a second call reuses it.
# The first interpreter that is new enough; name another one with PYTHON=...
SUITS := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	"$$p" -c '$(SUITS)' 2>/dev/null && { echo "$$p"; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=

.PHONY: run test check unit slow bench soak fuzz config clean

run: $(READY)
	$(BIN)/oneshot run $(ARGS)

test: $(READY)
	@echo "On two idle cores the quick tests take about 3 minutes, then the whole runs about 12."
	@$(MAKE) --no-print-directory unit slow

# The tests that take seconds, for the rhythm of work: a process per core.
unit: $(READY)
	$(BIN)/python -m pytest -m "not slow" --numprocesses logical

# The others: whole runs, which have processes of their own and wait for them. Two files at a time, whatever the cores.
slow: $(READY)
	$(BIN)/python -m pytest -m slow --numprocesses 2 --dist loadfile

# What CI holds a change to: format, lint, types, layering, tests.
check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

# Minutes of measuring, not a test: `make bench ARGS=--quick` for the short form.
bench: $(READY)
	PYTHONPATH=tests/reference $(BIN)/python tests/bench $(ARGS)

# Plugs pulled in a deployment on this machine, until the time is over: `make soak ARGS="--seed 7 --minutes 10"`.
soak: $(READY)
	PYTHONPATH=tests/flower $(BIN)/python tests/soak/soak.py $(ARGS)

# Malformed inputs for everything that is read from outside: `make fuzz ARGS="--examples 5000 --seed 1"`.
fuzz: $(READY)
	$(BIN)/python tests/fuzz $(ARGS)

config: $(READY)
	$(BIN)/python -m server_app.settings.config_table
	$(BIN)/python tests/docs/option_tables.py

clean:
	rm -rf $(VENV)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.14 was found: install one, or name it: make run PYTHON=/path/to/python3"; exit 1; }
	@"$(PYTHON)" -c '$(SUITS)' || { echo "$(PYTHON) is not Python 3.11 to 3.14; name one: make run PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) lacks the venv module: install it (Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)
