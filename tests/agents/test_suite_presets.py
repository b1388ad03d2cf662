"""Presets of whole suites: which agents have them, that each takes a learner step, and their sources."""

import dataclasses

import numpy as np
import pytest
from agent_batches import CONTINUOUS, batch_of, make_learner, moved_by
from dm_env import specs as dm_specs
from test_published_networks import ATARI

from framework import environments
from framework.environments.testing import FakeEnvironment, make_spec
from framework.runs.presets import HERE, MUJOCO, Preset, presets_of
from framework.runs.registry import find_agent
from framework.specs import make_environment_spec

MINATAR = make_spec(dm_specs.BoundedArray((10, 10, 4), np.float32, 0, 1), dm_specs.DiscreteArray(6))
VALUES = "apex c51 dqn iqn qr_dqn r2d2 rainbow"
ROBOTS = "d4pg ddpg mpo ppo sac td3 td7"
SUITES = {
    "atari:*": (ATARI, f"a2c a3c appo impala ppo {VALUES}"),
    "minatar:*": (MINATAR, f"ppo {VALUES}"),
    "beyond_the_rainbow": (ATARI, "iqn"),
    MUJOCO: (CONTINUOUS, f"{ROBOTS} simba_v2"),
    "dm_control:*": (CONTINUOUS, ROBOTS),
}
PAIRS = [(name, pattern) for pattern, (_, names) in SUITES.items() for name in names.split()]
CASES = {f"{name}, {pattern[:10]}": (name, pattern) for name, pattern in PAIRS}
LESS = {"batch_size": 2, "unroll_length": 4, "burn_in": 2, "period": 2, "minibatch_size": 8, "actor_delay": 1}


@pytest.mark.parametrize(("name", "pattern"), CASES.values(), ids=CASES)
def test_the_preset_of_a_suite_learns(name, pattern):
    agent = find_agent(name).load()
    config = agent().config
    settings = {**presets_of(agent)[pattern].agent}
    settings |= {field: value for field, value in LESS.items() if hasattr(config, field)}
    agent = agent(dataclasses.replace(config, **settings))
    spec, _ = SUITES[pattern]
    environment = environments.make(lambda: FakeEnvironment(spec), wrappers=agent.environment_wrappers())
    spec = make_environment_spec(environment)
    learner = make_learner(agent, spec)
    assert moved_by(learner, batch_of(agent, spec)) >= {
        name for name, child in learner.networks.named_children() if list(child.parameters())
    }
    assert all(parameter.isfinite().all() for parameter in learner.networks.parameters())


def test_each_setting_has_one_source():
    preset = Preset({"a": 1, "b": 2}, {"max_env_steps": 3, "num_actors": 4}, "A paper", {"Another": "b"})
    assert preset.by_source() == {
        "A paper": {"a": 1, "max_env_steps": 3},
        "Another": {"b": 2},
        HERE: {"num_actors": 4},
    }
    with pytest.raises(ValueError, match=r"sources: got \['c'\], expected fields of the preset"):
        dataclasses.replace(preset, sources={"Another": "c"}).by_source()


@pytest.mark.parametrize(("name", "pattern"), CASES.values(), ids=CASES)
def test_presets_of_suites_but_minatars_are_published(name, pattern):
    preset = presets_of(find_agent(name).load())[pattern]
    assert (preset.source == HERE) == (pattern == "minatar:*" and name != "ppo")
