"""Programs whose actors follow the learner in step end in good order, with exactly the steps asked for."""

import functools
import logging
import threading
import time

import numpy as np
import pytest
from helpers.small_programs import small_program

import launch
from agents.ppo import PPO, PPOConfig
from framework import replay
from framework.adders import QUEUE_TABLE
from framework.environments.testing import FakeEnvironment
from framework.loggers import read_jsonl
from framework.programs import RunConfig, make_program
from framework.specs import Array
from framework.workers import lockstep

CONFIG = {"unroll_length": 8, "epochs": 1, "hidden_sizes": (8,)}


def program(lag, steps, **changes):
    settings = {"num_actors": 2, "max_env_steps": steps, "evaluate_period": 200, **changes}
    return small_program(PPO(PPOConfig(max_policy_lag=lag, **CONFIG)), **settings)


def slow_ppo(before_step):
    """PPO whose learner calls ``before_step()`` first, in each step."""

    class Slow(PPO):
        def make_learner(self, networks, spec):
            learner = super().make_learner(networks, spec)
            step = learner.step
            learner.step = lambda batch: (before_step(), step(batch))[1]
            return learner

    return Slow


@pytest.mark.parametrize(("num_actors", "lag"), [(1, 0), (2, 1)])
def test_the_last_whole_batch_is_learned_from(num_actors, lag):
    agent = slow_ppo(lambda: time.sleep(0.2))(PPOConfig(max_policy_lag=lag, **CONFIG))
    environment = functools.partial(FakeEnvironment, episode_length=1_000)
    steps = num_actors * 3 * 8 * 4
    graph = small_program(agent, environment, num_actors=num_actors, max_env_steps=steps)
    assert launch.launch(graph, engine="threads")["learner_steps"] == 4


def test_the_last_evaluation_is_of_what_was_learned_last(tmp_path):
    agent = slow_ppo(lambda: time.sleep(0.2))(PPOConfig(**CONFIG))
    settings = {"evaluate_period": 5_000, "num_evaluation_episodes": 1, "directory": tmp_path}
    run = RunConfig(envs_per_actor=4, max_env_steps=4 * 8 * 5, **settings)
    graph = make_program(agent, functools.partial(FakeEnvironment, episode_length=50), run)
    assert launch.launch(graph, engine="threads")["learner_steps"] == 5
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if row["label"] == "evaluator"]
    assert [row["variables_version"] for row in rows] == [5]


# 127 steps end in the third unroll; others leave one actor with some steps when the other has none left.
CASES = [("serial", lag, steps) for lag in (0, 1) for steps in (127, 500, 611)]


@pytest.mark.parametrize(("engine", "lag", "steps"), [*CASES, ("threads", 0, 127), ("threads", 1, 611)])
def test_the_end_of_the_budget_leaves_nobody_waiting(engine, lag, steps):
    result = launch.launch(program(lag, steps), engine=engine)
    assert (result["reason"], result["env_steps"]) == ("max_env_steps", steps)


@pytest.mark.parametrize(("lag", "first"), [(0, 480), (1, 480), (0, 300)])
def test_a_run_goes_on_in_step_also_with_an_empty_queue(lag, first, tmp_path):
    """A batch has 48 steps, so the queue is empty after 480."""
    assert launch.launch(program(lag, first, directory=tmp_path), engine="serial")["env_steps"] == first
    result = launch.launch(program(lag, 1_000, directory=tmp_path), engine="threads")
    assert (result["reason"], result["env_steps"]) == ("max_env_steps", 1_000)
    assert result["learner_steps"] > 1_000 // (8 * 2 * 3) - 6


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_a_stop_ends_the_wait_for_a_version(engine):
    # The learner stops after its third step, when the actors wait for the next version or soon will.
    result = launch.launch(program(0, None, max_learner_steps=3, evaluate_period=None), engine=engine)
    assert result["learner_steps"] == 3


class Refused(PPO):
    """Its table takes nothing of what its actors send, and says so only after they went on."""

    def make_tables(self, spec):
        return [replay.Table.queue(QUEUE_TABLE, 100, signature={"nothing": Array((), np.float32)})]


def test_an_actor_that_waits_for_parameters_learns_that_its_unroll_was_refused():
    config = RunConfig(envs_per_actor=2, max_env_steps=400, evaluate_period=None)
    graph = make_program(Refused(PPOConfig(**CONFIG)), FakeEnvironment, config)
    with (
        pytest.raises(launch.NodeError, match="nothing"),
        launch.start(graph, engine="processes") as job,
    ):
        job.wait(timeout=60)


def test_an_actor_that_waits_long_says_so(monkeypatch, caplog):
    """The learner waits for the test, between its first two steps."""
    monkeypatch.setattr(lockstep, "_SAY_PERIOD", 1)
    gate, said = threading.Event(), threading.Event()
    slow = slow_ppo(lambda: gate.wait(30))

    class Hears(logging.Handler):
        def emit(self, record):
            said.set()

    logger = logging.getLogger(lockstep.__name__)
    logger.addHandler(handler := Hears())
    try:
        graph = make_program(
            slow(PPOConfig(**CONFIG)), FakeEnvironment, RunConfig(max_env_steps=100, evaluate_period=None)
        )
        with launch.start(graph, engine="threads") as job:
            assert said.wait(30)
            gate.set()
            assert job.wait(timeout=60)["env_steps"] == 100
    finally:
        logger.removeHandler(handler)
    text = caplog.messages[0]
    assert "actor-0 has waited" in text and "for version 1 of the parameters and has version 0" in text
    assert "All its items are in replay" in text
