"""RLPD: what is in its batches. Its losses are SAC's, and its data comes into replay as DQfD's does."""

import numpy as np
import pytest

import launch
from agents.rlpd import RLPD, RLPDConfig, pendulum
from framework import environments, specs
from framework.datasets import DEMONSTRATIONS_TABLE, table_numbers
from framework.programs import RunConfig, make_program

PENDULUM = "gymnasium:Pendulum-v1"
SIZES = {"hidden_sizes": (8,), "batch_size": 8, "min_replay_size": 20, "insert_burst": 16, "num_critics": 3}


def test_half_of_each_batch_is_data_and_there_are_the_learner_steps_that_were_asked_for(monkeypatch):
    seen, original = [], RLPD.loss

    def loss(self, networks, batch, context):
        shown = table_numbers(batch.info.key) == 0
        seen.append((shown.sum(), batch.data.reward[shown].min().item()))
        return original(self, networks, batch, context)

    monkeypatch.setattr(RLPD, "loss", loss)
    source = "agents.rlpd:pendulum(count=2)"
    agent = RLPD(RLPDConfig(demonstrations=source, samples_per_insert=12.0, actor_delay=3, **SIZES))
    config = RunConfig(num_actors=1, envs_per_actor=1, max_env_steps=120, evaluate_period=None, seed=1)
    result = launch.launch(make_program(agent, PENDULUM, config), engine="serial")
    # Three for each item, but for the burst.
    assert result["learner_steps"] == len(seen) == pytest.approx(3 * 120, abs=3 * 16)
    assert {count for count, _ in seen} == {4}
    assert min(reward for _, reward in seen) >= min(episode.reward.min() for episode in pendulum(2))


def test_data_of_another_environment_is_refused():
    spec = specs.make_environment_spec(environments.make("gymnasium:CartPole-v1"))
    agent = RLPD(RLPDConfig(demonstrations="agents.rlpd:pendulum(count=1)", **SIZES))
    with pytest.raises(ValueError, match="got the observation"):
        agent.make_tables(spec)
    with pytest.raises(ValueError, match="demonstrations: got None, expected a folder"):
        RLPD().make_tables(spec)
    assert agent.make_tables(specs.make_environment_spec(environments.make(PENDULUM)))[1].name == (
        DEMONSTRATIONS_TABLE
    )


def test_the_demonstrator_swings_up():
    assert np.mean([episode.reward.sum() for episode in pendulum(4)]) > -200
