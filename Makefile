# make train   the main job: DQN on CartPole-v1 as a multi-process program
# make test    the tests;  make lint  ruff and mypy
# Each creates .venv and installs what it needs. PYTHON=... picks another interpreter.
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
MINOR := $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])')
CONSTRAINTS := $(if $(wildcard constraints/py$(MINOR).txt),-c constraints/py$(MINOR).txt)
BIN := .venv/bin
# The folder of the run; a new one under runs/ if not given.
RUN ?=
SEED ?= 1
# One thread per process for numeric libraries: programs are many processes, tests run in several workers.
export OMP_NUM_THREADS ?= 1

.PHONY: train test lint test-reverb test-deepmind clean

.venv/installed: setup.py $(wildcard constraints/*.txt)
	@test -n "$(PYTHON)" || { echo "Repertory needs Python 3.10 or newer; none was found."; exit 1; }
	@test -n "$(CONSTRAINTS)" || echo "No tested versions for Python $(MINOR): installing the newest of everything."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check $(CONSTRAINTS) -e .
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install -q --disable-pip-version-check $(CONSTRAINTS) -e '.[test]'
	touch $@

train: .venv/installed
	$(BIN)/repertory train dqn --environment gymnasium:CartPole-v1 --engine processes --num-actors 2 --seed $(SEED) $(if $(RUN),--directory $(RUN))

test: .venv/installed-test
	$(BIN)/python -m pytest -n 2 tests

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-* build *.egg-info
