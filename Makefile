# make demo   trains tiny models on a synthetic language and evaluates them; no network after the install
# make test   the test suite
# make lint   ruff and mypy
# make leaderboard         the tables, the plot and the README's table, from leaderboard/results/
# make leaderboard-check   whether those in the checkout are these
# Each makes the virtual environment first, once, and again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test lint leaderboard leaderboard-check install clean

demo: $(VENV)/installed
	$(VENV)/bin/harness-ext demo

# One thread for each worker: two that use all cores each take longer than one after the other. A file is run by one worker, so
# that what its tests share is made once.
test: $(VENV)/installed-dev
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

leaderboard: $(VENV)/installed-dev
	$(VENV)/bin/harness-ext leaderboard build --no-site

leaderboard-check: $(VENV)/installed-dev
	HARNESS_EXT_CACHE=off OMP_NUM_THREADS=1 $(VENV)/bin/harness-ext leaderboard build --check

install: $(VENV)/installed

# All in one call of pip, so that torch is the constrained release from the start.
$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist site
