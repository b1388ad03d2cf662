"""Policies of runs, from Python: what an observation must look like."""

import numpy as np
import pytest
from dm_env import specs as dm_specs

from framework.programs import load_policy
from framework.programs.loading import _envs

AGENTS = {
    "dqn": "gymnasium:CartPole-v1",
    "ppo": "gymnasium:CartPole-v1",
    "impala": "gymnasium:CartPole-v1",
    "sac": "gymnasium:CartPole-v1",
    "ppo, one number": "gymnasium:FrozenLake-v1",
}


@pytest.mark.parametrize("name", AGENTS)
def test_an_observation_without_envs_is_refused(make_run, name):
    folder = make_run(steps=[10], agent=name.split(",")[0], environment=AGENTS[name])
    policy = load_policy(folder.path)
    spec = policy.spec.observations
    one = np.zeros(spec.shape, spec.dtype)
    assert len(policy(one[None])) == 1 and len(policy(np.stack([one, one, one]))) == 3
    expected = r"expected \[B\] for" if spec.shape == () else r"expected \[B, 4\] for"
    for wrong in (one, one[None, None], np.zeros((2, 7))):
        with pytest.raises(ValueError, match=expected):
            policy(wrong)
    if spec.shape:
        with pytest.raises(ValueError, match=r"got shape \[4\], expected"):
            policy(one)
        with pytest.raises(ValueError, match=r"expected \[B, 4\] for .* observation\[None\]"):
            policy(one)
        with pytest.raises(ValueError, match=r"the same B everywhere\.$"):  # another width: no advice on B
            policy(np.zeros((2, 7)))
        with pytest.raises(ValueError, match=expected):
            policy(one.tolist())


SPEC = {"a": dm_specs.Array((2,), np.float32), "b": (dm_specs.DiscreteArray(3),)}


def test_every_leaf_of_a_nest_has_the_same_envs():
    assert _envs({"a": np.zeros((5, 2)), "b": (np.zeros(5),)}, SPEC) == 5
    wrong = {
        "no envs": {"a": np.zeros(2), "b": (np.zeros(()),)},
        "no envs in one": {"a": np.zeros((5, 2)), "b": (np.zeros(()),)},
        "others in one": {"a": np.zeros((5, 2)), "b": (np.zeros(4),)},
        "no such leaf": {"a": np.zeros((5, 2))},
    }
    for nest in wrong.values():
        with pytest.raises(ValueError, match=r"expected {'a': '\[B, 2\]', 'b': \('\[B\]',\)} for B envs"):
            _envs(nest, SPEC)
