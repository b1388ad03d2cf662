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


def feed_single(adder, episodes, extras=None):
    """As Acme's tests do: ``add_first``, then action and time step in turn."""
    for steps in episodes:
        adder.add_first(dm_env.TimeStep(*steps[0]))
        for i, step in enumerate(steps[1:]):
            adder.add(np.int32(0), dm_env.TimeStep(*step), () if extras is None else extras(i))


def feed_envs(adder, episodes, envs, extras=None):
    """Every env plays the same steps, env b after b more FIRST steps: no two envs end at the same time."""
    timeline = [step for steps in episodes for step in steps]
    index = {id(step): i - 1 for steps in episodes for i, step in enumerate(steps)}
    real = timeline[1]
    rows = []
    for b in range(envs):
        wait = [timeline[0]] * b
        rows.append(wait + timeline + [None] * (envs - b))
    began = False
    for column in zip(*rows, strict=True):
        if all(step is None for step in column):
            break
        # An env that has played all its steps is reset; its open episode has no transition.
        column = [timeline[0] if step is None else step for step in column]

        def stack(field, default, column=column):
            values = [default if step[field] is None else step[field] for step in column]
            return tree.map_structure(lambda *leaves: np.stack(leaves), *values)

        zero = tree.map_structure(np.zeros_like, (real[1], real[2]))
        timestep = dm_env.TimeStep(
            np.array([int(step[0]) for step in column]),
            stack(1, zero[0]),
            stack(2, zero[1]),
            stack(3, None),
        )
        if not began:
            adder.add_first(timestep)
            began = True
            continue
        extra = ()
        if extras is not None:
            values = [extras(max(0, index[id(step)])) for step in column]
            extra = tree.map_structure(lambda *leaves: np.stack(leaves), *values)
        adder.add(np.arange(envs, dtype=np.int32), timestep, extra)


def check(items, expected):
    assert len(items) == len(expected)
    for item, want in zip(items, expected, strict=True):
        tree.assert_same_structure(item, want)
        tree.map_structure(lambda x, y: np.testing.assert_array_almost_equal(x, y, decimal=6), item, want)
        tree.map_structure(lambda x, y: _same_shape(x, y), item, want)


def _same_shape(x, y):
    assert np.shape(x) == np.shape(y)


def check_envs(items, expected, envs):
    """``feed_envs`` takes the env's number as its action: each env has the expected items in order."""
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
