# `make probe`, `make test` and `make docs` each do all the set-up a fresh clone needs, once: a virtual environment in
# .venv with the pinned versions of constraints.txt. NO_INSTALL=1 uses $(PYTHON) as it is and installs nothing.

PYTHON ?= python3
VENV ?= .venv
NO_INSTALL ?= 0
PROBE_ARGS ?= --effort quick
PYTEST_ARGS ?=
SITE ?= build/docs

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-dev setup-docs probe test test-beside test-alone docs lint types format clean

ifeq ($(NO_INSTALL),1)
RUN := PYTHONPATH=$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)
READY :=
READY_DEV :=
READY_DOCS :=
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.ringtune-ready
READY_DEV := $(VENV)/.ringtune-ready-dev
READY_DOCS := $(VENV)/.ringtune-ready-docs
endif

# No byte-compilation of all of torch ahead of time: what is imported is compiled when it is. Where Python may not keep
# that, every process would do it anew, 5 s instead of 2, so there it is done once.
COMPILE := $(if $(PYTHONDONTWRITEBYTECODE),--compile,--no-compile)
PIP_INSTALL = $(VENV)/bin/python -m pip install -qq --no-input --disable-pip-version-check $(COMPILE) --constraint constraints.txt

help:
	@echo "make probe    measure this machine and write its profile (PROBE_ARGS='--effort standard' for longer)"
	@echo "make test     run the tests (PYTEST_ARGS='-k merge' for some)"
	@echo "make docs     build the documentation into $(SITE)/html"
	@echo "make lint | types | format | clean"
	@echo "NO_INSTALL=1  use the current Python and install nothing; PYTHON=... names another one"

setup: $(READY)

setup-dev: $(READY_DEV)

setup-docs: $(READY_DOCS)

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit("ringtune needs Python 3.11 or newer and $(PYTHON) is %d.%d; name another one: make PYTHON=python3.12 ..." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# The build backend is installed first, with the pins, so that the editable install downloads no second copy of it.
$(VENV)/.ringtune-ready: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "installing ringtune with the versions of constraints.txt into $(VENV) (torch is large; this happens once)"
	@$(PIP_INSTALL) hatchling editables
	@$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

# .ringtune-ready-dev and -docs: the extra of that name, too.
$(VENV)/.ringtune-ready-%: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "installing ringtune[$*] with the versions of constraints.txt into $(VENV) (torch is large; this happens once)"
	@$(PIP_INSTALL) hatchling editables
	@$(PIP_INSTALL) --no-build-isolation --editable '.[$*]'
	@touch $(VENV)/.ringtune-ready $@

# 6 is no failure: a profile was written, and the probe has said what it has for cells that could not be measured.
probe: $(READY)
	@$(RUN) -m autotune probe $(PROBE_ARGS) || { code=$$?; [ $$code -eq 6 ] || exit $$code; \
	echo "exit code 6, which is none for make: a profile was written, and cells above could not be measured" >&2; }
	$(if $(findstring --dry-run,$(PROBE_ARGS)),,@echo "to look at it: $(RUN) -m autotune show, or report for a web page" >&2)

# Most tests take turns on all cores, those of a file on one worker, as they share what is costly; those that measure
# have the machine to themselves. Both parts run, whatever fails.
test: $(READY_DEV)
ifeq ($(strip $(PYTEST_ARGS)),)
	@status=0; $(MAKE) --no-print-directory test-beside || status=$$?; \
	$(MAKE) --no-print-directory test-alone || status=$$?; exit $$status
else
	@$(RUN) -m pytest $(PYTEST_ARGS)
endif

test-beside: $(READY_DEV)
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not alone"

test-alone: $(READY_DEV)
	@$(RUN) -m pytest -m alone

# Warnings are errors: a link to a page that is gone, a name that is not there. Nothing is fetched. Every page is read
# anew, since those that did not change would not warn again.
docs: $(READY_DOCS)
	@$(RUN) -m sphinx -M html docs $(SITE) --fresh-env --write-all --quiet --fail-on-warning --keep-going
	@echo "$(SITE)/html/index.html"

lint: $(READY_DEV)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

types: $(READY_DEV)
	@$(RUN) -m mypy

format: $(READY_DEV)
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

clean:
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
