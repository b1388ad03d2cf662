"""PPO learns with every kind of space."""

import dataclasses
import functools

import numpy as np
import pytest
from agent_cases import SMALL
from dm_env import specs as dm_specs
from ppo_programs import play

from framework.environments.testing import FakeEnvironment, make_spec

ACTIONS = {
    "discrete": dm_specs.DiscreteArray(3, np.int64),
    "multi discrete": dm_specs.BoundedArray((2,), np.int64, 0, [1, 3]),
    "from another number": dm_specs.BoundedArray((2,), np.int32, [-1, 5], [1, 6]),
    "multi binary": dm_specs.BoundedArray((2, 2), np.int8, 0, 1),
    "bounded": dm_specs.BoundedArray((2,), np.float32, [-2.0, 0.0], [2.0, 100.0]),
    "bounded below": dm_specs.BoundedArray((1,), np.float32, 0.0, np.inf),
    "unbounded": dm_specs.Array((2,), np.float64),
    "matrix": dm_specs.BoundedArray((2, 2), np.float32, -1.0, 1.0),
    "scalar": dm_specs.BoundedArray((), np.float32, -1.0, 1.0),
}
OBSERVATIONS = {
    "vector": dm_specs.Array((3,), np.float32),
    "float64": dm_specs.Array((2, 2), np.float64),
    "choice": dm_specs.DiscreteArray(4, np.int64),
    "dict": {"a": dm_specs.Array((2,), np.float32), "b": (dm_specs.DiscreteArray(3, np.int64),)},
    "picture": dm_specs.BoundedArray((44, 44, 1), np.uint8, 0, 255),
}
KINDS = [("vector", action) for action in ACTIONS] + [(o, "discrete") for o in OBSERVATIONS if o != "vector"]


CASES = [(*kind, {}) for kind in KINDS]
CASES += [
    (*kind, changes)
    for kind in (("vector", "multi binary"), ("vector", "bounded"), ("dict", "discrete"))
    for changes in ({"target_kl": 0.01}, {"recurrent": "lstm"})
]


@pytest.mark.parametrize(("observation", "action", "changes"), CASES, ids=str)
def test_learns_with_every_kind_of_space(observation, action, changes):
    config = dataclasses.replace(SMALL["ppo"].config, normalize_observations=True, **changes)
    spec = make_spec(observations=OBSERVATIONS[observation], actions=ACTIONS[action])
    environment = functools.partial(FakeEnvironment, spec, episode_length=4)  # Refuses what does not fit.
    batches = play(config, environment, max_env_steps=100, num_actors=1)
    assert len(batches) > 3
    for _, batch, parameters in batches:
        real = np.asarray(batch.data.mask) > 0
        for name, value in parameters.items():
            acted = np.asarray(batch.data.extras["policy"][name])
            np.testing.assert_allclose(value.numpy()[real], acted[real], atol=1e-4)
