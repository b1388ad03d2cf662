"""Whole programs: one agent, every engine, real nodes."""

from __future__ import annotations

import functools
import pathlib
import warnings

import numpy as np
import pytest

import launch
from agents.dqn import DQN, DQNConfig
from agents.random_actions import RandomActions
from framework.checkpoints import Checkpointer
from framework.environments.testing import FakeEnvironment, make_spec
from framework.loggers import read_jsonl, without_times
from framework.programs import RunConfig, make_program

ENGINES = ["serial", "threads", "processes"]

SMALL = DQNConfig(
    min_replay_size=50, batch_size=16, samples_per_insert=4.0, hidden_sizes=(16,), insert_burst=64, n_step=2
)


def small_program(directory: pathlib.Path | None = None, **changes) -> launch.Program:
    settings: dict = {
        "num_actors": 2,
        "envs_per_actor": 3,
        "max_env_steps": 500,
        "evaluate_period": 200,
        "num_evaluation_episodes": 3,
        "log_period": 100,
        "learner_log_period": 20,
        "publish_period": 5,
        "directory": directory,
    }
    settings.update(changes)
    agent = settings.pop("agent", None) or DQN(SMALL)
    factory = settings.pop("environment", functools.partial(FakeEnvironment, episode_length=7))
    return make_program(agent, factory, RunConfig(**settings))


@pytest.mark.parametrize("engine", ENGINES)
def test_makes_exactly_the_steps_and_says_why_it_ended(engine, tmp_path):
    result = launch.launch(small_program(tmp_path), engine=engine)
    assert result["reason"] == "max_env_steps"
    assert result["env_steps"] == 500
    # Actors may be 118 items ahead by the limiter; 2 x 64 wait for room, as many are staged. The rest has to
    # be paid for with samples: (500 - 118 - 256) * 4 / 16 learner steps.
    assert result["learner_steps"] >= 25
    rows = list(read_jsonl(tmp_path / "metrics.jsonl"))
    labels = {row["label"] for row in rows}
    # One actor may have made all the steps before the other was there.
    assert labels - {"actor-0", "actor-1"} == {"learner", "evaluator"} and len(labels) > 2
    learners = [row for row in rows if row["label"] == "learner"]
    learner = learners[-1]
    assert learner["steps"] > 0 and np.isfinite(learner["loss"])
    assert learner["replay/sampled"] >= learner["steps"] * SMALL.batch_size - 64
    assert 0 < learner["replay/sample_age"] < learner["replay/inserted"]
    assert learner["acting_staleness"] >= 0 and learner["times_sampled"] >= 1
    # The last row may be of the moment after the last step.
    assert max(row["time/env_steps_per_s"] for row in learners) > 0
    assert learner["time/replay/insert_blocked_s"] >= 0 and learner["time/replay/sample_blocked_s"] >= 0
    reader = Checkpointer(tmp_path / "checkpoints").restore()
    assert reader.state("counter")["counts"]["env_steps"] == 500
    returns = [row["episode_return"] for row in rows if row["label"] == "evaluator"]
    best = reader.state("best")
    assert best["row"]["episode_return"] == max(returns)
    agent = DQN(SMALL)
    networks = agent.make_networks(make_spec())
    networks.load_state_dict(best["networks"])


@pytest.mark.parametrize("engine", ENGINES)
def test_replay_ratio_is_that_of_the_rate_limiter(engine):
    """No engine lets actors or the learner get further ahead than the error buffer says."""
    program = small_program(max_env_steps=3000, evaluate_period=None)
    with launch.start(program, engine=engine) as job:
        result = job.wait()
    # An episode of 7 steps makes 7 + n - 1 items; its last ones may be missing at the end.
    items = result["env_steps"] * (7 + SMALL.n_step - 1) / 7
    drawn = result["learner_steps"] * SMALL.batch_size
    slack = SMALL.insert_burst * SMALL.samples_per_insert + SMALL.batch_size
    # Beside the buffer: items on their way when the last step is made, and the beginning of learning.
    on_the_way = 2 * (512 + 128) * SMALL.samples_per_insert
    cursor = items * SMALL.samples_per_insert - drawn
    assert cursor >= -slack
    assert cursor <= SMALL.min_replay_size * SMALL.samples_per_insert + slack + on_the_way


def test_serial_repeats_bit_by_bit(tmp_path):
    metrics, states = [], []
    for name in ("first", "second"):
        launch.launch(small_program(tmp_path / name, seed=3), engine="serial")
        metrics.append([without_times(row) for row in read_jsonl(tmp_path / name / "metrics.jsonl")])
        states.append(Checkpointer(tmp_path / name / "checkpoints").restore().state("learner"))
    assert metrics[0] == metrics[1] and len(metrics[0]) > 10
    assert_equal_state(states[0], states[1])


def test_another_seed_is_another_run(tmp_path):
    metrics = []
    for seed in (1, 2):
        launch.launch(small_program(tmp_path / str(seed), seed=seed), engine="serial")
        metrics.append([without_times(row) for row in read_jsonl(tmp_path / str(seed) / "metrics.jsonl")])
    assert metrics[0] != metrics[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_goes_on_where_it_stopped(engine, tmp_path):
    launch.launch(small_program(tmp_path), engine=engine)
    first = Checkpointer(tmp_path / "checkpoints").restore().state("learner")
    result = launch.launch(small_program(tmp_path, max_env_steps=800), engine=engine)
    assert result["env_steps"] == 800
    assert result["learner_steps"] >= first["steps"]
    second = Checkpointer(tmp_path / "checkpoints").restore().state("learner")
    assert second["steps"] > first["steps"]


@pytest.mark.parametrize("engine", ENGINES)
def test_target_return_ends_the_program(engine):
    result = launch.launch(small_program(target_return=-1e9, max_env_steps=100_000), engine=engine)
    assert result["reason"] == "target_return"
    assert result["env_steps"] < 100_000


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_stop_ends_an_evaluation(engine):
    """Its episodes may take longer than a node has to end."""

    def environment(evaluation=False):
        return FakeEnvironment(episode_length=10**9 if evaluation else 5)

    config = RunConfig(evaluate_period=5, evaluation_options={"evaluation": True})
    program = make_program(RandomActions(), environment, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", launch.StopTimeoutWarning)
        with launch.start(program, engine) as job:
            assert job.client("counter").wait_for("env_steps", 500, timeout=60.0)
            job.stop("result")
            assert job.wait(timeout=60.0) == "result"


@pytest.mark.parametrize("engine", ENGINES)
def test_max_learner_steps_ends_the_program(engine):
    program = small_program(max_env_steps=None, max_learner_steps=40, evaluate_period=None)
    result = launch.launch(program, engine=engine)
    assert result == {"reason": "max_learner_steps", "learner_steps": 40}


def test_a_resumed_program_makes_no_learner_steps_above_the_limit(tmp_path):
    settings = {"max_env_steps": None, "max_learner_steps": 20, "evaluate_period": None, "publish_period": 10}
    for limit, steps in ((20, 20), (20, 20), (30, 30)):
        settings["max_learner_steps"] = limit
        result = launch.launch(small_program(tmp_path, **settings), engine="serial")
        assert result == {"reason": "max_learner_steps", "learner_steps": steps}
    assert Checkpointer(tmp_path / "checkpoints").restore().state("learner")["steps"] == 30


def test_without_an_evaluator_the_last_actor_ends_the_program():
    result = launch.launch(small_program(evaluate_period=None), engine="serial")
    assert result["reason"] == "max_env_steps" and result["env_steps"] == 500


def test_a_limit_below_the_steps_made_ends_a_resumed_program_without_an_evaluator(tmp_path):
    launch.launch(small_program(tmp_path, evaluate_period=None), engine="serial")
    result = launch.launch(small_program(tmp_path, evaluate_period=None, max_env_steps=300), engine="serial")
    assert result["reason"] == "max_env_steps" and result["env_steps"] == 500


def test_the_smallest_agent_runs(tmp_path):
    result = launch.launch(small_program(tmp_path, agent=RandomActions()), engine="serial")
    assert result["env_steps"] == 500


class BreaksInEpisode(FakeEnvironment):
    """Raises at its twentieth step."""

    def __init__(self, how: str = "raises"):
        super().__init__(episode_length=7)
        self._count = 0
        self._how = how

    def step(self, action):
        timestep = super().step(action)
        self._count += 1
        if self._count < 20:
            return timestep
        if self._how == "raises":
            raise RuntimeError("the motor is stuck")
        if self._how == "nan":
            return timestep._replace(reward=np.float32("nan"))
        return timestep._replace(observation=np.zeros(9, np.float32))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("how", "words"), [("raises", "the motor is stuck"), ("nan", "nan"), ("shape", "shape")]
)
def test_a_broken_environment_is_one_clear_error(engine, how, words):
    with pytest.raises(launch.NodeError) as raised:
        launch.launch(small_program(environment=functools.partial(BreaksInEpisode, how)), engine=engine)
    assert words in str(raised.value).lower()


@pytest.mark.parametrize("name", ["num_actors", "envs_per_actor", "max_env_steps", "evaluate_period"])
def test_counts_that_make_no_sense_are_refused(name):
    with pytest.raises(ValueError, match=name):
        small_program(**{name: 0})


def test_a_goal_without_an_evaluator_is_refused():
    with pytest.raises(ValueError, match="evaluator"):
        small_program(target_return=1.0, evaluate_period=None)


def assert_equal_state(first, second) -> None:
    import torch

    assert type(first) is type(second)
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_equal_state(first[key], second[key])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_equal_state(one, other)
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, np.ndarray):
        np.testing.assert_array_equal(first, second)
    else:
        assert first == second
