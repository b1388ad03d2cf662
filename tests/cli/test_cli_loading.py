"""Policies of runs, from Python: what an observation must look like."""

import numpy as np
import pytest
from dm_env import specs as dm_specs

from framework.programs import load_policy
from framework.programs.loading import _envs


@pytest.mark.parametrize("name, environment", [("dqn", "CartPole-v1"), ("ppo", "FrozenLake-v1")])
def test_an_observation_without_envs_is_refused(make_run, name, environment):
    folder = make_run(steps=[10], agent=name, environment=f"gymnasium:{environment}")
    policy = load_policy(folder.path)
    spec = policy.spec.observations
    one = np.zeros(spec.shape, spec.dtype)
    assert len(policy(one[None])) == 1 and len(policy(np.stack([one, one, one]))) == 3
    expected = r"expected \[B\] for" if spec.shape == () else r"expected \[B, 4\] for"
    wrong = [(one, expected), (one[None, None], expected), (np.zeros((2, 7)), expected)]
    if spec.shape:
        wrong += [
            (one, r"got shape \[4\], expected \[B, 4\] for .* observation\[None\]"),
            (np.zeros((2, 7)), r"the same B everywhere\.$"),  # Another width: no advice on B.
            (one.tolist(), expected),
        ]
    for value, text in wrong:
        with pytest.raises(ValueError, match=text):
            policy(value)


SPEC = {"a": dm_specs.Array((2,), np.float32), "b": (dm_specs.DiscreteArray(3),)}


def test_every_leaf_of_a_nest_has_the_same_envs():
    assert _envs({"a": np.zeros((5, 2)), "b": (np.zeros(5),)}, SPEC) == 5
    wrong = {
        "no envs": {"a": np.zeros(2), "b": (np.zeros(()),)},
        "no envs in one": {"a": np.zeros((5, 2)), "b": (np.zeros(()),)},
        "others in one": {"a": np.zeros((5, 2)), "b": (np.zeros(4),)},
        "no such leaf": {"a": np.zeros((5, 2))},
    }
    with pytest.raises(ValueError, match="observation/b/0: got 3, expected 0 to 2"):
        _envs({"a": np.zeros((1, 2)), "b": (np.full(1, 3),)}, SPEC)
    for nest in wrong.values():
        with pytest.raises(ValueError, match=r"expected {'a': '\[B, 2\]', 'b': \('\[B\]',\)} for B envs"):
            _envs(nest, SPEC)
