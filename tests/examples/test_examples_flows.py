"""IMPALA as a plan: how far its worker samples ahead, and which batches fit."""

import functools

import pytest

import launch
from agents.impala import IMPALAConfig
from examples.flows import IMPALAPlan
from framework.environments.testing import FakeEnvironment
from framework.loggers import read_jsonl
from framework.programs import RunConfig, make_program

PERIODS = {"evaluate_period": None, "publish_period": 1, "learner_log_period": 1}
RUN = RunConfig(envs_per_actor=2, max_learner_steps=6, **PERIODS)


def run(directory, **settings):
    config = RunConfig(**{**vars(RUN), "directory": str(directory)})
    agent = IMPALAPlan(IMPALAConfig(unroll_length=4, hidden_sizes=(4,), **settings))
    environment = functools.partial(FakeEnvironment, episode_length=9)
    launch.launch(make_program(agent, environment, config), engine="serial")
    rows = [row for row in read_jsonl(directory / "metrics.jsonl") if row["label"] == "learner"]
    return [row["staleness"] for row in rows]


@pytest.mark.parametrize("queue_batches, prefetch_batches", [(1, 0), (2, 0), (1, 1), (2, 1)])
def test_samples_are_as_old_as_those_ahead_of_them(tmp_path, queue_batches, prefetch_batches):
    ahead = queue_batches + prefetch_batches - 1
    ages = run(tmp_path, batch_size=2, queue_batches=queue_batches, prefetch_batches=prefetch_batches)
    assert ages == [min(step, ahead) for step in range(6)]


def test_a_batch_is_several_samples_of_a_worker(tmp_path):
    # Step k learns from samples 2 k and 2 k + 1, both of the parameters that step k - 1 made.
    assert run(tmp_path, batch_size=4, queue_batches=1, prefetch_batches=0) == [0.0] * 6
    with pytest.raises(launch.NodeError, match="batch_size: got 3, expected a multiple of 2, the envs of"):
        run(tmp_path / "other", batch_size=3)
