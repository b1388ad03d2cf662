# make train   the main job: DQN on CartPole-v1 as a multi-process program
# make test    the tests;  make coverage  the same, with the lines they run;  make lint  ruff and mypy
# make docs    the site, in site/
# make test-reverb    replay on a real dm-reverb (Python 3.11)
# make test-server    environments of a server on Python 3.8
# make test-deepmind  programs on a real Launchpad, with dm-reverb and Acme (Python 3.10)
# make nightly        every agent in every distributed form, three seeds each (hours); clients in JavaScript;
#                     hosts that fail (root)
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

# $(call tests,ENVIRONMENT,ARGUMENTS) runs pytest. A test that fails fails the run; only those that
# tests/quarantine.txt names, with a reason and a date, are tried again. With AGAIN=1, which CI sets, up to three
# others are too, and named at the end of the output.
AGAIN ?=
tests = $(1)/bin/python -m pytest $(2)$(if $(AGAIN), || $(1)/bin/python tests/helpers/try_again.py)

.PHONY: train test coverage lint docs test-reverb test-ray test-server test-deepmind nightly clean

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
	$(call tests,.venv,-n 2 tests)

# Takes a fifth longer.
coverage: .venv/installed-test
	$(call tests,.venv,-n 2 --cov --cov-report=term:skip-covered tests)

# dm-reverb and Launchpad exist for certain versions of Python only. A shim of pyenv may be there and fail.
python = $(shell for p in python$(1) "$$(pyenv root 2>/dev/null)"/versions/$(1).*/bin/python; do "$$p" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(1)")' 2>/dev/null && echo "$$p" && break; done)

.PHONY: python3.8 python3.10 python3.11
python3.8 python3.10 python3.11: python%:
	@test -n "$(call python,$*)" || { printf '\n%s\n\n' "##### Python $* was not found: what needs it is NOT tested. #####" >&2; exit 1; }

.venv-reverb/installed: PY = $(call python,3.11)
.venv-ray/installed: PY = $(PYTHON)
.venv-deepmind/installed: PY = $(call python,3.10)
.venv-deepmind/installed: NO_DEPS = --no-deps
# Without compiling: most of these modules are never imported.
.venv-%/installed: constraints/%.txt setup.py
	@test -n "$(PY)" || { printf '\n%s\n\n' "##### The Python for .venv-$* was not found: what needs it is NOT tested. #####" >&2; exit 1; }
	"$(PY)" -m venv .venv-$*
	.venv-$*/bin/python -m pip install -q --disable-pip-version-check --no-compile $(NO_DEPS) -r constraints/$*.txt
	.venv-$*/bin/python -m pip install -q --disable-pip-version-check --no-deps -e .
	touch $@

test-reverb: .venv-reverb/installed
	$(call tests,.venv-reverb,-n 2 tests/conformance/replay tests/replay/test_reverb_backend.py)

# The second in a process of its own: after other clusters in one process Ray asks its job server for a token.
# The third makes hosts of namespaces, which needs root; without, nodes of Ray on one host stand in (a warning
# says so), and the tests that need hosts are skipped. REPERTORY_TEST_HOSTS=cluster uses the nodes as root, too.
# RAY=ray runs the idioms of launch on Ray too, which takes minutes more.
RAY ?= ray and not test_idioms
test-ray: .venv-ray/installed
	$(call tests,.venv-ray,tests/conformance/launch tests/conformance/flow tests/conformance/programs -k "$(RAY)" --ignore tests/conformance/launch/test_ray_jobs.py)
	$(call tests,.venv-ray,tests/conformance/launch/test_ray_jobs.py)
	$(call tests,.venv-ray,tests/cluster)

# LAUNCHPAD=launchpad runs the conformance tests with a process for each node too, which takes minutes more.
LAUNCHPAD ?= launchpad_mt
test-deepmind: .venv-deepmind/installed
	$(call tests,.venv-deepmind,-n 2 tests/conformance/deepmind tests/conformance/replay tests/replay/test_reverb_backend.py)
	$(call tests,.venv-deepmind,-n 2 tests/conformance/launch -k $(LAUNCHPAD))

# Environments of a server on Python 3.8, which has three packages and nothing of Repertory.
.venv-server/installed: constraints/server.txt
	@test -n "$(call python,3.8)" || { printf '\n%s\n\n' "##### Python 3.8 was not found: servers on it are NOT tested. #####" >&2; exit 1; }
	"$(call python,3.8)" -m venv .venv-server
	.venv-server/bin/python -m pip install -q --disable-pip-version-check -r constraints/server.txt
	touch $@

test-server: .venv/installed-test .venv-server/installed
	$(call tests,.venv,tests/conformance/environments)

# Runs what docs/results/nightly lacks. ROWS=cartpole-dqn runs one row.
nightly: .venv/installed-test .venv-reverb/installed .venv-ray/installed .venv-deepmind/installed
	$(BIN)/python benchmarks/nightly.py $(ROWS) --python reverb=.venv-reverb/bin/python ray=.venv-ray/bin/python launchpad=.venv-deepmind/bin/python
	$(if $(ROWS),,$(BIN)/python benchmarks/external_clients.py)
	$(if $(ROWS),,.venv-ray/bin/python benchmarks/failures.py)

.venv/installed-docs: .venv/installed
	$(BIN)/python -m pip install -q --disable-pip-version-check $(CONSTRAINTS) -e '.[docs]'
	touch $@

docs: .venv/installed-docs
	$(BIN)/mkdocs build --strict

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-* build site *.egg-info
