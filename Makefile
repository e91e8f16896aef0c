# make tune: set up .venv and tune on this machine's own device; ARGS go to `tilewright tune`.
# make test: the same set-up, then every check that has to pass; make check is the one of GPU kernels on the CPU.

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
LINKS := .links/tilewright
ROOMS := templates generator runtime tuner results
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# Where containers set it, every process would compile all of PyTorch's Python anew: 5 s each instead of 5 s once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: tune test check lint types links clean
.DELETE_ON_ERROR:

tune: $(VENV)/tune.stamp
	$(BIN)/tilewright tune $(ARGS)

# mypy keeps one core busy, the check all that are left.
test: lint
	@$(MAKE) --no-print-directory -j2 types check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# The 36 kernels that have the most pairs between them, a sixth of the sample. The limit is a safety net: past it the check fails.
check: $(VENV)/test.stamp
	$(BIN)/tilewright check --variants 36 --time-limit 240

lint: $(VENV)/test.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/test.stamp links
	MYPYPATH=.links $(BIN)/mypy --strict -p tilewright

# The rooms are one package only once installed; mypy sees them as one through links.
links:
	@rm -rf .links && mkdir -p $(LINKS)
	@ln -s $(foreach room,$(ROOMS),../../$(room)) $(patsubst %,../../%,$(filter-out %/__pycache__,$(wildcard tilewright/*))) $(LINKS)/

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, $(PYTHON) is {v[0]}.{v[1]}; run make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/tune.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/test.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/tune.stamp

clean:
	rm -rf $(VENV) .links build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
