"""Population-based training: the worst members copy the best."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agents.a2c import A2C, A2CConfig
from agents.dqn import DQN, DQNConfig
from framework.environments.testing import FakeEnvironment
from framework.experiments.population import Member, Population, make_population
from framework.flow import LocalNode
from framework.programs import RunConfig
from framework.programs.make import environment_spec, make_environment
from framework.workers.worker import Setup

FAKE = functools.partial(FakeEnvironment, episode_length=7)
SEARCH = {"learning_rate": (1e-4, 1e-2)}
A2C_AGENT = A2C(A2CConfig(hidden_sizes=(4,), unroll_length=5))
DQN_AGENT = DQN(DQNConfig(hidden_sizes=(4,), min_replay_size=20, batch_size=8, samples_per_insert=4.0))
SETTINGS = {"envs_per_actor": 2, "max_env_steps": 100, "evaluate_period": 50, "num_evaluation_episodes": 2}


def make_member(agent=A2C_AGENT, learning_rate=1e-3, index=0, **settings):
    config = RunConfig(**{**SETTINGS, **settings})
    setup = Setup(
        agent.for_program(config.envs_per_actor),
        functools.partial(make_environment, agent, FAKE, config),
        environment_spec(agent, FAKE, config),
        config,
    )
    return Member(setup, {"learning_rate": learning_rate}, index)


def tensors(state):
    return {name: value for name, value in state["networks"].items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("agent", [A2C_AGENT, DQN_AGENT], ids=["on-policy", "off-policy"])
def test_a_member_trains_and_takes_the_state_of_another(agent):
    one, other = make_member(agent, 1e-3, 0), make_member(agent, 1e-2, 1)
    result = one.train(60)
    assert np.isfinite(result["score"]) and result["settings"] == {"learning_rate": 1e-3}
    assert result["learner"]["env_steps"] == 60 and result["learner"]["steps"] >= 6
    other.load({**result, "settings": {"learning_rate": 5e-3}})
    assert other.learner.optimizer.param_groups[0]["lr"] == 5e-3
    for name, value in tensors(other.learner.save()).items():
        assert torch.equal(value, result["learner"]["networks"][name])
    assert other.result()["score"] == result["score"]  # It acts with them, too.
    assert other.train(20)["learner"]["env_steps"] == 80
    for member in (one, other):
        member.close()


def test_a_member_whose_step_is_not_finite_has_the_lowest_score():
    member = make_member()
    for parameter in member.learner.networks.parameters():
        parameter.data.fill_(np.nan)
    result = member.train(60)
    assert result == {"score": -np.inf, "settings": {"learning_rate": 1e-3}, "learner": None}
    member.load(result)
    assert np.isfinite(member.train(20)["score"])
    member.close()


class Recorded:
    """A member that keeps what it was given."""

    def __init__(self):
        self.futures = SimpleNamespace(
            call=lambda step, args: LocalNode(self).call(lambda own, *a: own.load(*a), *args)
        )
        self.loaded = None

    def load(self, state):
        self.loaded = state


def test_the_worst_copy_the_best_with_other_settings():
    members = [Recorded() for _ in range(6)]
    config = RunConfig(seed=3, evaluate_period=50, max_env_steps=100)
    scores = [3.0, 9.0, -np.inf, 8.0, 1.0, 5.0]
    results = [
        {"score": score, "settings": {"learning_rate": 8e-3 + index * 1e-4}, "learner": index}
        for index, score in enumerate(scores)
    ]
    population = Population(members, config, SEARCH, copies=2, factors=(0.5, 2.0))
    after = population.select(results)
    for index in (0, 1, 3, 5):
        assert after[index]["learner"] == index and members[index].loaded is None
    for index in (2, 4):
        winner = after[index]["copied"]
        assert winner in (1, 3) and members[index].loaded["learner"] == winner
        rate = members[index].loaded["settings"]["learning_rate"]
        assert rate in ((8e-3 + winner * 1e-4) * 0.5, 1e-2)  # The bound.


def test_members_that_train_alone_copy_nothing():
    members = [Recorded() for _ in range(4)]
    population = Population(members, RunConfig(evaluate_period=5, max_env_steps=5), SEARCH, 0, (2.0,))
    results = [{"score": 1.0, "settings": {"learning_rate": 1e-3}, "learner": None} for _ in members]
    assert not any("copied" in each for each in population.select(results))


BAD = {
    "no such setting": ({"rate": (1e-4, 1e-2)}, {}, {}, "search has no field 'rate'"),
    "bounds": ({"learning_rate": (0.0, 1.0)}, {}, {}, r"search: learning_rate: got \(0.0, 1.0\), expected"),
    "copies": (SEARCH, {}, {"copies": 2, "members": 3}, "copies: got 2, expected 0 to 1"),
    "actors": (SEARCH, {"num_actors": 4}, {}, "num_actors: got 4, expected 1 for a population"),
    "no end": (SEARCH, {"max_env_steps": None}, {}, "max_env_steps: got None"),
}


@pytest.mark.parametrize(("search", "settings", "options", "message"), BAD.values(), ids=BAD)
def test_bad_settings_are_refused(search, settings, options, message):
    with pytest.raises(ValueError, match=message):
        make_population(A2C_AGENT, FAKE, search, RunConfig(**{**SETTINGS, **settings}), **options)


def test_whole_bounds_have_whole_settings():
    config, agent = RunConfig(**SETTINGS), DQN(DQNConfig(hidden_sizes=(4,)))
    program = make_population(agent, FAKE, {"target_update_period": (10, 1000)}, config, members=4, copies=1)
    values = sorted(node._args[2]["target_update_period"] for node in program.groups["member"])
    assert values == [10, 46, 215, 1000]
