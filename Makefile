# Two commands for everybody: `make run` and `make test`. Both set up .venv once; a second call reuses it.
# The first interpreter that is new enough; name another one with PYTHON=...
SUITS := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	"$$p" -c '$(SUITS)' 2>/dev/null && { echo "$$p"; break; }; done)
endif
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
# Tests start many processes, which share what one of them has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test check unit slow bench results soak fuzz config docs lock clean

help:  ## list these targets
	@sed -n 's/^\([a-z]*\):.*  ## /\1\t/p' Makefile

run: $(READY)  ## run the main job, and print its result
	$(BIN)/oneshot run $(ARGS)

test: $(READY)  ## run every test
	@echo "On two idle cores the quick tests take about 4 minutes, then the whole runs about 19."
	@$(MAKE) --no-print-directory unit slow

unit: $(READY)  ## run the tests that take seconds, a process per core
	$(BIN)/python -m pytest -m "not slow" --numprocesses logical --dist loadfile

# Whole runs have processes of their own and wait for them: two files at a time, whatever the cores.
slow: $(READY)  ## run the other tests: whole runs, Ray, deployments
	$(BIN)/python -m pytest -m slow --numprocesses 2 --dist loadfile

check: $(READY)  ## what CI runs: format, lint, types, every test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

bench: $(READY)  ## measure for minutes; ARGS=--quick for the short form
	PYTHONPATH=tests/reference $(BIN)/python tests/bench $(ARGS)

results: $(READY)  ## renew the pages' tables and plots from docs/results/
	PYTHONPATH=tests/bench $(BIN)/python tests/bench/rivals.py --write
	$(BIN)/python tests/bench/tally_plot.py
	PYTHONPATH=tests/bench $(BIN)/python tests/bench/factorial_tables.py
	PYTHONPATH=tests/bench $(BIN)/python tests/bench/feature_tables.py --write
	PYTHONPATH=tests/bench $(BIN)/python tests/bench/feature_plot.py
	PYTHONPATH=tests/bench $(BIN)/python tests/bench/student_plot.py
	PYTHONPATH=tests/bench $(BIN)/python tests/bench/published_plot.py

soak: $(READY)  ## pull plugs in a deployment on this machine; ARGS="--seed 7 --minutes 10"
	PYTHONPATH=tests/flower $(BIN)/python tests/soak/soak.py $(ARGS)

fuzz: $(READY)  ## try malformed inputs on every reader; ARGS="--examples 5000 --seed 1"
	PYTHONPATH=tests/unit/strategies/flower $(BIN)/python tests/fuzz $(ARGS)

config: $(READY)  ## write the settings into pyproject.toml and the pages
	$(BIN)/python -m server_app.settings.config_table
	$(BIN)/python tests/docs/option_tables.py

docs: $(READY)  ## write the documentation as a site; open build/site/index.html in a browser
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
		--requirement requirements-docs.lock
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean:  ## remove .venv
	rm -rf $(VENV)

# The lock file: every package but torch, whose build depends on the machine, and the libraries of its GPU builds.
# Two steps below: first the locked packages with their hashes, then torch and this project, with torch's version pinned.
# The packages of `make docs` have a file of their own, in the same versions where both have one.
COMPILE := pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	--no-emit-find-links
LOCK_HEAD := \# Without torch: each of its builds has other hashes. constraints.txt pins its version, and pip takes it in a second step.
lock: $(READY)
	$(BIN)/uv $(COMPILE) pyproject.toml --extra dev --constraint constraints.txt --no-emit-package torch \
		--output-file requirements.lock
	$(BIN)/python -c "import re, pathlib; p = pathlib.Path('requirements.lock'); \
		p.write_text('$(LOCK_HEAD)\n' + re.sub(r'(?m)^(nvidia|cuda|triton).*\n(    --hash.*\n)+', '', p.read_text()))"
	$(BIN)/uv $(COMPILE) --group docs --constraint requirements.lock --output-file requirements-docs.lock

$(READY): pyproject.toml constraints.txt requirements.lock
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.14 was found: install one, or name it: make run PYTHON=/path/to/python3"; exit 1; }
	@"$(PYTHON)" -c '$(SUITS)' || { echo "$(PYTHON) is not Python 3.11 to 3.14; name one: make run PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) lacks the venv module: install it (Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
		--requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)
