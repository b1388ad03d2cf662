# make train     the main job: DQN on CartPole-v1 as a multi-process program
# make test      the tests of every change;  make coverage  the same, with the lines they run
# make lint      ruff and mypy;  make docs  the site, in site/;  make pages  the tables in docs/ that are made
# make pair BASE=COMMIT  CPU seconds of whole programs here and at a commit, in turns
# make test-ray, test-reverb, test-deepmind, test-server  one real program or more on each back end
# make release   every suite whose record in tests/release.json is older than what it tests (hours);
#                SUITES="ray mutants" runs these
# make tag       the tags of the releases in changes/releases.txt;  make tag VERSION=0.3.0  this commit's, too, if no
#                record is stale
# make nightly   what every agent learns in every distributed form, three seeds each (hours)
# Each makes the environment that it needs. PYTHON=... picks another interpreter, VENV=... another folder.
VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
MINOR := $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])' 2>/dev/null)
BIN := $(VENV)/bin
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

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

.PHONY: help train test coverage lint docs pages pair test-reverb test-ray test-server test-deepmind release tag nightly clean

# An environment of another Python than the one asked for is made anew.
ifneq ($(MINOR),$(shell $(BIN)/python -c 'import sys; print("%d%d" % sys.version_info[:2])' 2>/dev/null))
$(shell rm -f $(VENV)/installed $(VENV)/installed-test)
endif

environment = $(PYTHON) constraints/environment.py
python-found = @test -n "$(MINOR)" || { echo "Repertory needs Python 3.10 or newer; $(or $(PYTHON),it) was not found."; exit 1; }

$(VENV)/installed: setup.py $(wildcard constraints/*.txt)
	$(python-found)
	$(environment) $(VENV)
	touch $@

$(VENV)/installed-test: setup.py $(wildcard constraints/*.txt)
	$(python-found)
	$(environment) $(VENV) --extras test docs
	touch $(VENV)/installed $@

train: $(VENV)/installed
	$(BIN)/repertory train dqn --environment gymnasium:CartPole-v1 --engine processes --num-actors 2 --seed $(SEED) $(if $(RUN),--directory $(RUN))

# The environments of a server have a target of their own.
test: $(VENV)/installed-test
	$(call tests,$(VENV),-n 2 tests --ignore tests/conformance/environments)

# Takes a fifth longer.
coverage: $(VENV)/installed-test
	$(call tests,$(VENV),-n 2 --cov --cov-report=term:skip-covered tests)

docs: $(VENV)/installed-test
	$(BIN)/mkdocs build --strict

# The tables of settings, results and names, from what they are about.
pages: $(VENV)/installed-test
	$(BIN)/python docs/hooks/markers.py --write

# A comment is a sentence: it does not begin with a word that leaves its subject and its verb out.
no-subject = @! grep -rnE "\# +(As|Before|Between|For|Its|Not|Of|Otherwise|So|Those|Whose|Without) " --include='*.py' framework agents launch examples \
  || { echo "A comment begins with As, Before, Between, For, Its, Not, Of, Otherwise, So, Those, Whose or Without. Write a sentence."; exit 1; }

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(no-subject)

# Programs of this commit and of another, in turns; see benchmarks/pair.py.
BASE ?= $(shell git describe --tags --abbrev=0 2>/dev/null)
pair: $(VENV)/installed-test
	$(BIN)/python benchmarks/pair.py $(BASE)

# dm-reverb and Launchpad exist for certain versions of Python only. A shim of pyenv may be there and fail.
python = $(shell for p in python$(1) "$$(pyenv root 2>/dev/null)"/versions/$(1).*/bin/python; do "$$p" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(1)")' 2>/dev/null && echo "$$p" && break; done)

.PHONY: $(foreach version,8 10 11 12 13 14,python3.$(version))
python3.8 python3.10 python3.11 python3.12 python3.13 python3.14: python%:
	@test -n "$(call python,$*)" || { printf '\n%s\n\n' "##### Python $* was not found: what needs it is NOT tested. #####" >&2; exit 1; }
	@echo "$(call python,$*)"

.venv-reverb/installed: PY = $(call python,3.11)
.venv-ray/installed: PY = $(PYTHON)
.venv-deepmind/installed: PY = $(call python,3.10)
.venv-deepmind/installed: FLAGS = --no-deps
# Environments of a server on Python 3.8, which has three packages and nothing of Repertory.
.venv-server/installed: PY = $(call python,3.8)
.venv-server/installed: FLAGS = --alone
.venv-%/installed: constraints/%.txt setup.py
	@test -n "$(PY)" || { printf '\n%s\n\n' "##### The Python for .venv-$* was not found: what needs it is NOT tested. #####" >&2; exit 1; }
	$(environment) .venv-$* --python $(PY) --requirements constraints/$*.txt $(FLAGS)
	touch $@

# Tests with a back end as a parameter, and those of one; what has the mark `release` runs in `make release`.
ON_REVERB = tests/conformance/replay tests/replay/test_reverb_backend.py
ON_ENGINES = tests/conformance/launch tests/conformance/flow tests/conformance/programs
test-reverb: .venv-reverb/installed
	$(call tests,.venv-reverb,-n 2 -m "reverb and not release" $(ON_REVERB))

test-ray: .venv-ray/installed
	$(call tests,.venv-ray,-m "ray and not release" $(ON_ENGINES))

test-deepmind: .venv-deepmind/installed
	$(call tests,.venv-deepmind,-n 2 -m "not release and (launchpad or not ray)" -k "launchpad or deepmind" tests/conformance/launch tests/conformance/deepmind)
	$(call tests,.venv-deepmind,-n 2 -m "reverb and not release" $(ON_REVERB))

test-server: $(VENV)/installed-test .venv-server/installed
	$(call tests,$(VENV),tests/conformance/environments)

SUITES ?=
release: $(VENV)/installed-test .venv-ray/installed .venv-reverb/installed .venv-deepmind/installed .venv-server/installed
	$(BIN)/python tests/release.py run $(SUITES)

# Tags the releases in changes/releases.txt; with VERSION, this commit too, which no stale suite may depend on.
VERSION ?=
tag: $(if $(VERSION),$(VENV)/installed-test)
	while read version commit; do git rev-parse -q --verify refs/tags/v$$version >/dev/null || \
	  git tag -a v$$version -m "Repertory $$version" $$commit || exit; done < changes/releases.txt
ifneq ($(VERSION),)
	$(BIN)/python tests/release.py check
	git tag -a v$(VERSION) -m "Repertory $(VERSION)"
endif

# Runs what results/records/nightly lacks. ROWS=cartpole-dqn runs one row.
nightly: $(VENV)/installed-test .venv-reverb/installed .venv-ray/installed .venv-deepmind/installed
	$(BIN)/python -m results.nightly $(ROWS) --python reverb=.venv-reverb/bin/python ray=.venv-ray/bin/python launchpad=.venv-deepmind/bin/python
	$(if $(ROWS),,$(BIN)/python -m benchmarks.clusters.external_clients)
	$(if $(ROWS),,.venv-ray/bin/python -m benchmarks.clusters.failures)

clean:
	rm -rf .venv .venv-* build site *.egg-info
