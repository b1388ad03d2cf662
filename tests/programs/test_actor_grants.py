"""Actors take their steps in grants, and episodes go on from one grant to the next."""

import launch
from agents.random_actions import RandomActions
from framework import programs
from framework.loggers import InMemoryLogger
from framework.programs.services import Counter

LOG = InMemoryLogger()  # the serial engine keeps all nodes in this process


class WithoutTables(RandomActions):
    def make_tables(self, spec):
        return []


def test_no_episode_is_cut_between_grants():
    LOG.rows.clear()
    program = programs.make_program(
        WithoutTables(),
        "gymnasium:CartPole-v1",
        programs.RunConfig(
            envs_per_actor=4, max_env_steps=6001, evaluate_period=None, log_period=1000, directory=None
        ),
        logger_factory=lambda: LOG,
    )
    result = launch.launch(program, engine="serial")
    assert result["env_steps"] == 6001
    rows = [row for row in LOG.rows if row["label"] == "actor-0"]
    before, finished_steps = 0, 0.0
    for row in rows:
        finished_steps += (row["episodes"] - before) * row["episode_length"]
        before = row["episodes"]
    # Only the episodes open at the end may be missing: random ones are far shorter than 250 steps.
    assert 6001 - finished_steps < 4 * 250


def test_grants_grow_with_what_was_made(monkeypatch):
    asked, grant = [], Counter.grant

    def watched(self, who, n, spent=0, **counts):
        asked.append(n)
        return grant(self, who, n, spent)

    monkeypatch.setattr(Counter, "grant", watched)
    program = programs.make_program(
        WithoutTables(),
        "gymnasium:CartPole-v1",
        programs.RunConfig(envs_per_actor=2, max_env_steps=5000, evaluate_period=None, directory=None),
        logger_factory=lambda: LOG,
    )
    assert launch.launch(program, engine="serial")["env_steps"] == 5000
    assert asked[0] == 2 * 16
    assert max(asked) == 2 * 64
    assert asked.count(0) == 1  # the settlement
    assert asked[:-1] == sorted(asked[:-1])
