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
SLOW := slow and not check
# What is installed beside torch, and torch: `make newest TORCH=torch` takes the newest.
LOCKED := --require-hashes --requirement requirements.lock
TORCH := $(shell grep '^torch==' constraints.txt)
# Tests start many processes, which share what one of them has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test check unit slow lowest newest bench results soak fuzz config docs hub outdated lock clean

help:  ## list these targets
	@sed -n 's/^\([a-z]*\):.*  ## /\1\t/p' Makefile

run: $(READY)  ## run the main job, and print its result
	$(BIN)/oneshot run $(ARGS)

test: $(READY)  ## run the tests, but for some whole runs of minutes
	@echo "On two idle cores the quick tests take about 2 to 4 minutes, then the whole runs about 5 to 10."
	@$(MAKE) --no-print-directory unit slow

unit: $(READY)  ## run the tests that take seconds, a process per core
	$(BIN)/python -m pytest -m "not slow" --numprocesses logical --dist loadfile

# Whole runs have processes of their own and wait for them: two files at a time, whatever the cores. To read the other
# files too takes as long as one of those runs.
slow: $(READY)  ## run the other tests: whole runs, Ray, deployments
	$(BIN)/python -m pytest -m "$(SLOW)" --numprocesses 2 --dist loadfile --no-loadscope-reorder \
		$$(grep -rl --include='test_*.py' 'mark\.slow' tests)

lowest:  ## run the tests of `unit` with the lowest versions that pyproject.toml allows, of every extra
	$(call solved,lowest-direct)

newest:  ## run them with the newest
	$(call solved,highest)

check: $(READY)  ## what CI runs: format, lint, types, every test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test SLOW=slow

bench: $(READY)  ## measure for minutes; ARGS=--quick for the short form
	PYTHONPATH=tests/reference $(BIN)/python tests/bench $(ARGS)

results: $(READY)  ## renew the tables of the published schedule from docs/results/
	PYTHONPATH=. $(BIN)/python tests/bench/run_tables.py

soak: $(READY)  ## pull plugs in a deployment on this machine; ARGS="--seed 7 --minutes 10"
	PYTHONPATH=tests:tests/flower $(BIN)/python tests/soak/soak.py $(ARGS)

fuzz: $(READY)  ## try malformed inputs on every reader; ARGS="--examples 5000 --seed 1"
	PYTHONPATH=tests/unit/strategies/flower $(BIN)/python tests/fuzz $(ARGS)

config: $(READY)  ## write the settings into pyproject.toml and the pages
	$(BIN)/python -m server_app.settings.config_table
	$(BIN)/python tests/docs/option_tables.py

docs: $(READY)  ## write the documentation as a site; open build/site/index.html in a browser
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
		--requirement requirements-docs.lock
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

hub:  ## write build/hub, the committed app without tests and pages, for `flwr app publish build/hub`
	rm -rf build/hub && mkdir -p build/hub
	git archive HEAD -- .gitignore LICENSE README.md pyproject.toml hatch_build.py oneshot_fl.py \
		fl_app server_app client_app strategies conf | tar -x -C build/hub

outdated: $(BIN)/uv  ## compare the versions of constraints.txt with the newest ones
	@mkdir -p build && grep '==' constraints.txt | sort >build/tested
	@sed 's/==.*//' build/tested | $(BIN)/uv pip compile --quiet --no-deps --python-version 3.11 $(BARE) - | sort | \
		diff --side-by-side --suppress-common-lines --width 80 build/tested - || true

clean:  ## remove .venv and what was built
	rm -rf $(VENV) build

# The lock files: every package but torch, whose build depends on the machine, and the libraries of its GPU builds.
# Two steps below: first the locked packages with their hashes, then torch and this project.
# The packages of `make docs` have a file of their own, in the same versions where both have one.
BARE := --no-header --no-annotate --no-emit-find-links
COMPILE := pip compile --quiet --universal --python-version 3.11 --generate-hashes --constraint constraints.txt \
	--no-annotate --no-emit-find-links --custom-compile-command 'make lock'
lock: $(BIN)/uv  ## carry constraints.txt to the lock files and to Flower's app format; ARGS=--upgrade lifts other packages too
	$(BIN)/uv $(COMPILE) $(ARGS) pyproject.toml --extra dev --no-emit-package torch --output-file requirements.lock
	$(BIN)/uv $(COMPILE) $(ARGS) --group docs --constraint requirements.lock --output-file requirements-docs.lock
	sed -E -i.bak '/^(nvidia|cuda|triton)/,/[^\]$$/d' requirements.lock
	sed -E -i.bak 's/^(flwr-version-target = ).*/\1"'$$(sed -n 's/^flwr==//p' constraints.txt)'"/' pyproject.toml
	rm requirements.lock.bak pyproject.toml.bak

# An environment of its own with what uv finds, in place of lock and constraints; torch is the tested one, or TORCH.
define solved
	rm -rf build/$@
	$(PYTHON) -m venv build/$@
	build/$@/bin/python -m pip install --quiet --disable-pip-version-check uv
	echo '$(TORCH)' | build/$@/bin/uv pip compile --quiet --resolution $(1) --python build/$@ --all-extras $(BARE) \
		--no-emit-package torch - pyproject.toml --output-file build/$@/packages.txt
	sed -E -i.bak '/^(nvidia|cuda|triton)/d' build/$@/packages.txt
	$(MAKE) --no-print-directory unit VENV=build/$@ LOCKED='--requirement build/$@/packages.txt'
endef

# Flower brings uv. Where it is there, a changed version needs no other installation before the lock is written.
$(BIN)/uv:
	@$(MAKE) --no-print-directory $(READY)

$(READY): pyproject.toml constraints.txt requirements.lock
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.14 was found: install one, or name it: make run PYTHON=/path/to/python3"; exit 1; }
	@"$(PYTHON)" -c '$(SUITS)' || { echo "$(PYTHON) is not Python 3.11 to 3.14; name one: make run PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) lacks the venv module: install it (Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(LOCKED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' --editable '.[dev]'
	touch $(READY)
