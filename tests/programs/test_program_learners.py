"""Programs with several learners: they learn together, end together, and go on together."""

import dataclasses
import functools
import os
import pathlib
import signal

import numpy as np
import pytest
from helpers.small_programs import SMALL, small_program

import launch
from agents.dqn import DQN
from agents.ppo import PPO, PPOConfig
from agents.random_actions import RandomActions
from framework.loggers import read_jsonl

PATIENCE = 240.0
CONFIG = dataclasses.replace(SMALL, prioritized=True)


def program(agent=None, **settings):
    return small_program(agent or DQN(CONFIG), **{"num_learners": 2, **settings})


@pytest.mark.filterwarnings("error::launch.StopTimeoutWarning")
def test_two_learners_make_the_steps_of_one_and_go_on_after_a_resume_until_they_are_stopped(tmp_path):
    result = launch.launch(program(directory=tmp_path, max_learner_steps=20))
    assert (result["reason"], result["learner_steps"]) == ("max_learner_steps", 20)
    with launch.start(program(directory=tmp_path)) as job:
        assert job.client("counter").wait_for("learner_steps", 30, timeout=PATIENCE)
        job.stop()  # Learners wait for data, and for each other.
        assert job.wait(timeout=60) is None
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if row["label"] == "learner"]
    assert rows[-1]["steps"] >= 30 and np.isfinite(rows[-1]["loss"])
    # Each learner takes its half of the batch of 16, and no batch is taken for nothing but the last few.
    taken = next(row["replay/sampled"] for row in rows if row["steps"] == 20)
    assert 20 * 16 <= taken <= 20 * 16 + 4 * 16


@pytest.mark.filterwarnings("error::launch.StopTimeoutWarning")
def test_two_on_policy_learners_share_the_envs(tmp_path):
    config = PPOConfig(hidden_sizes=(8, 8), unroll_length=6, epochs=2, minibatch_size=8, max_policy_lag=1)
    settings = {"envs_per_actor": 4, "max_learner_steps": 8, "learner_log_period": 1}
    assert launch.launch(program(PPO(config), directory=tmp_path, **settings))["learner_steps"] == 8
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if row["label"] == "learner"]
    # Rows of all envs are counted; an episode of 7 steps has a closing row, which teaches nothing.
    assert all(4 * 5 <= row["rows"] <= 4 * 6 for row in rows)
    assert all(row["staleness"] <= 2 for row in rows)


class Dies(DQN):
    """Learners are killed, one after the other: each in its fifth step, or before it."""

    DEATHS = [(1, True), (0, True), (1, False)]  # rank, and whether in a step
    folder: pathlib.Path

    def make_learner(self, networks, spec):
        self.learner = super().make_learner(networks, spec)
        step = self.learner.step
        self.learner.step = lambda batch: (self.die(True), step(batch))[1]
        return self.learner

    def make_dataset(self, client):
        return Interrupted(super().make_dataset(client), functools.partial(self.die, False))

    def die(self, in_step):
        deaths = len(list(self.folder.glob("death-*")))
        due = deaths < len(self.DEATHS) and self.DEATHS[deaths] == (self.rank, in_step)
        if due and self.learner.steps >= 5:
            (self.folder / f"death-{deaths}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Interrupted:
    def __init__(self, dataset, before):
        self._dataset, self._before = dataset, before

    def __next__(self):
        self._before()
        return next(self._dataset)

    def __getattr__(self, name):
        return getattr(self._dataset, name)


@pytest.mark.timeout(300)
def test_killed_learners_come_back_and_the_group_goes_on(tmp_path):
    agent = Dies(CONFIG)
    agent.folder = tmp_path
    settings = {"learner_log_period": 1, "publish_period": 1, "log_period": 10}
    graph = program(agent, directory=tmp_path, max_learner_steps=40, **settings)
    with launch.start(graph, restarts={"learner": 2}) as job:
        result = job.wait(timeout=PATIENCE)
        assert (result["reason"], result["learner_steps"]) == ("max_learner_steps", 40)
        restarts = {node["label"]: node["restarts"] for node in job.nodes() if node["restarts"]}
        assert restarts == {"learner-0": 1, "learner-1": 2}
    rows = list(read_jsonl(tmp_path / "metrics.jsonl"))
    for label, name in (("learner", "version"), ("actor-0", "variables_version")):
        versions = [row[name] for row in rows if row["label"] == label]
        assert versions == sorted(versions) and versions


@pytest.mark.parametrize(
    ("agent", "learners", "message"),
    [
        (DQN(CONFIG), 3, "num_learners: got 3, expected a divisor of 16"),
        (PPO(), 2, "num_learners: got 2, expected a divisor of 3"),
        (DQN(CONFIG), 0, "num_learners: got 0"),
        (RandomActions(), 2, "RandomActions (does not learn|cannot learn)"),
    ],
    ids=["indivisible batch", "indivisible envs", "none", "nothing to learn"],
)
def test_numbers_of_learners_that_make_no_sense_are_refused(agent, learners, message):
    with pytest.raises(ValueError, match=message):
        program(agent, num_learners=learners, max_env_steps=10)
