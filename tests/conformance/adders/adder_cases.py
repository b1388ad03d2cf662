"""What the cases of Acme's adders share: episodes, how adders are fed, how items are compared.

The expected items of the cases are those of Acme's own adder tests and of runs of its adders. Observations
are 1, 2, 3 ..., the last step of an episode is a termination (discount 0) unless a case says otherwise.
"""

import dm_env
import numpy as np
import tree
from dm_env import specs


def array(value):
    """Numbers as float32, structures kept."""
    if isinstance(value, dict):
        return {key: array(child) for key, child in value.items()}
    if isinstance(value, tuple):
        return tuple(array(child) for child in value)
    return np.asarray(value, np.float32)


def episode(rewards, discounts=None, truncated=False, observe=array):
    """``[(kind, reward, discount, observation), ...]`` of one episode, the first step included."""
    if discounts is None:
        discounts = [1.0] * (len(rewards) - 1) + [1.0 if truncated else 0.0]
    steps = [(dm_env.StepType.FIRST, None, None, observe(1))]
    for i, (reward, discount) in enumerate(zip(rewards, discounts, strict=True)):
        kind = dm_env.StepType.LAST if i == len(rewards) - 1 else dm_env.StepType.MID
        steps.append((kind, array(reward), array(discount), observe(i + 2)))
    return steps


def feed(adder, episodes, extras=None, envs=None):
    """As Acme's tests do: ``add_first``, then action and time step in turn; all envs play the same."""

    def many(leaf):
        return leaf if envs is None or leaf is None else np.stack([leaf] * envs)

    for steps in episodes:
        for i, (kind, *values) in enumerate(steps):
            kind = kind if envs is None else np.full(envs, kind)
            timestep = dm_env.TimeStep(kind, *tree.map_structure(many, values))
            if i == 0:
                adder.add_first(timestep)
            else:
                action = np.int32(0) if envs is None else np.arange(envs, dtype=np.int32)
                adder.add(action, timestep, () if extras is None else tree.map_structure(many, extras(i - 1)))


def check(items, expected):
    assert len(items) == len(expected)
    for item, want in zip(items, expected, strict=True):
        tree.assert_same_structure(item, want)
        tree.map_structure(lambda x, y: np.testing.assert_array_almost_equal(x, y, decimal=6), item, want)
        tree.map_structure(lambda x, y: _same_shape(x, y), item, want)


def _same_shape(x, y):
    assert np.shape(x) == np.shape(y)


def check_envs(items, expected, envs):
    """``feed`` takes the env's number as its action: each env has the expected items in order."""
    assert {int(np.ravel(item.action)[0]) for item in items} == (set(range(envs)) if expected else set())
    for env in range(envs):
        own = [item for item in items if np.ravel(item.action)[0] == env]
        check([item._replace(action=np.zeros_like(item.action)) for item in own], expected)


def check_signature(items, signature):
    for item in items:
        tree.map_structure(_fits, signature, item)


def _fits(spec, value):
    assert value.dtype == spec.dtype, (spec, value)
    assert len(value.shape) == len(spec.shape)
    assert all(size is None or size == n for size, n in zip(spec.shape, value.shape, strict=True)), (
        spec,
        value,
    )


def spec_like(value):
    return tree.map_structure(lambda x: specs.Array(np.shape(x), np.asarray(x).dtype), value)
