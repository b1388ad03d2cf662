"""Specs from gymnasium spaces and of environments."""

import gymnasium
import numpy as np
import pytest
import tree
from gymnasium import spaces

from agents.ppo import PPO
from framework import environments, nest, specs
from framework.environments import testing
from framework.environments.remote import environment_server
from framework.environments.remote.spec_data import parse_spec
from framework.environments.wrappers import _single_spec
from framework.networks.heads import Actions

_MOST = {dtype: np.finfo(dtype).max for dtype in (np.float16, np.float32, np.float64)}
_SPACES = {
    **{
        f"box without bounds, {np.dtype(dtype).name}, {part}": (
            spaces.Box(-most * dtype(part), most * dtype(part), (2,), dtype),
            specs.Array((2,), dtype),
        )
        for dtype, most in _MOST.items()
        for part in (0.5, 1.0)
    },
    "box": (
        spaces.Box(-1.0, 2.0, (3,), np.float32),
        specs.BoundedArray((3,), np.float32, minimum=[-1.0] * 3, maximum=[2.0] * 3),
    ),
    "box without bounds": (spaces.Box(-np.inf, np.inf, (2, 2), np.float64), specs.Array((2, 2), np.float64)),
    "box with one bound": (
        spaces.Box(np.array([0.0, -np.inf]), np.array([1.0, np.inf]), dtype=np.float64),
        specs.BoundedArray((2,), np.float64, minimum=[0.0, -np.inf], maximum=[1.0, np.inf]),
    ),
    "picture": (spaces.Box(0, 255, (4, 4), np.uint8), specs.BoundedArray((4, 4), np.uint8, 0, 255)),
    "discrete": (spaces.Discrete(4), specs.DiscreteArray(4, np.int64)),
    "discrete with a start": (spaces.Discrete(4, start=-2), specs.DiscreteArray(4, np.int64)),
    "multi-discrete": (
        spaces.MultiDiscrete([2, 3]),
        specs.BoundedArray((2,), np.int64, minimum=[0, 0], maximum=[1, 2]),
    ),
    "multi-discrete with a start": (
        spaces.MultiDiscrete([2, 3], start=[5, -1]),
        specs.BoundedArray((2,), np.int64, minimum=[5, -1], maximum=[6, 1]),
    ),
    "multi-binary": (spaces.MultiBinary(5), specs.BoundedArray((5,), np.int8, 0, 1)),
}


@pytest.mark.parametrize("name", _SPACES)
def test_a_space_becomes_its_spec(name):
    space, expected = _SPACES[name]
    spec = specs.from_space(space)
    assert type(spec) is type(expected)
    if isinstance(space, spaces.Box):  # Servers on old Pythons have a rule of their own.
        data = environment_server.describe_space(space)
        assert parse_spec(data, "observation").replace(name=spec.name) == spec
    assert (spec.shape, spec.dtype) == (expected.shape, expected.dtype)
    if isinstance(expected, specs.BoundedArray):
        np.testing.assert_array_equal(np.broadcast_to(spec.minimum, spec.shape), expected.minimum)
        np.testing.assert_array_equal(np.broadcast_to(spec.maximum, spec.shape), expected.maximum)


@pytest.mark.parametrize("dtype", _MOST)
@pytest.mark.parametrize("part", [0.5, 1.0])
def test_bounds_of_the_largest_numbers_are_none(dtype, part):
    most = _MOST[dtype] * dtype(part)
    spec = specs.BoundedArray((3,), dtype, [-1.0, -most, -most], [2.0, 3.0, most])
    np.testing.assert_array_equal(specs.bounds(spec), [[-1.0, -np.inf, -np.inf], [2.0, 3.0, np.inf]])
    assert not specs.is_bounded(spec) and specs.is_bounded(specs.BoundedArray((2,), dtype, -9e3, 9e3))
    assert abs(testing.draw(spec, np.random.default_rng(0), (50,))[:, 2]).max() <= 1
    with np.errstate(over="raise"):
        assert not specs.is_bounded(_single_spec(spec))
    with pytest.raises(ValueError, match="finite bounds"):
        Actions(spec, squash=True)


def test_nested_spaces_become_nested_specs_with_paths_as_names():
    space = spaces.Dict(
        {"z": spaces.Discrete(3, start=1), "a": spaces.Tuple((spaces.Box(0, 1, (2,)), spaces.MultiBinary(2)))}
    )
    spec = specs.from_space(space)
    assert isinstance(spec, dict) and isinstance(spec["a"], tuple)
    assert spec["a"][1].name == "observation/a/1"
    assert [path for path, _ in specs.leaves(spec)] == [("a", 0), ("a", 1), ("z",)]
    assert specs.discrete_offsets(space) == [0, 0, 1]


@pytest.mark.parametrize(
    "space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2)), spaces.Graph(spaces.Discrete(2), None)]
)
def test_an_unsupported_space_is_an_error_that_names_it_and_its_place(space):
    with pytest.raises(specs.UnsupportedSpaceError, match=f"observation/inner.*{type(space).__name__}"):
        specs.from_space(spaces.Dict({"inner": space}))


def test_an_environment_with_an_unsupported_space_is_refused_by_make():
    class Talker(gymnasium.Env):
        observation_space = spaces.Text(5)
        action_space = spaces.Discrete(2)

    with pytest.raises(specs.UnsupportedSpaceError, match="Text"):
        environments.make(Talker)


def test_spec_of_an_environment_has_no_env_dimension():
    with environments.make("gymnasium:CartPole-v1", num_envs=3, seed=0) as environment:
        spec = specs.make_environment_spec(environment)
    assert spec.observations.shape == (4,)
    assert spec.observations.dtype == np.float32
    assert spec.actions.num_values == 2
    assert (spec.rewards.shape, spec.rewards.dtype) == ((), np.float32)
    assert (spec.discounts.minimum, spec.discounts.maximum) == (0, 1)


def test_paths_pick_the_leaves_in_order():
    value = {"b": (1, {"y": 2, "x": 3}), "a": [4, testing.make_spec(5, 6, 7, 8)]}
    assert nest.unflattener(value)(tree.flatten(value)) == value
    assert [specs.pick(value, path) for path, _ in specs.leaves(value)] == tree.flatten(value)


def test_zeros():
    spec = {"a": specs.Array((2, 3), np.uint8), "b": specs.DiscreteArray(4, np.int64)}
    zeros = specs.zeros(spec, (5,))
    assert zeros["a"].shape == (5, 2, 3) and zeros["a"].dtype == np.uint8
    assert zeros["b"].shape == (5,) and zeros["b"].dtype == np.int64


_TOO_LARGE = {
    "action": testing.make_spec(actions=specs.DiscreteArray(2**31, np.int64)),
    "action/b": testing.make_spec(actions={"b": specs.BoundedArray((), np.int64, -(2**63), 2**63 - 1)}),
    "observation": testing.make_spec(specs.DiscreteArray(2**31, np.int64)),
}


@pytest.mark.parametrize("field", _TOO_LARGE)
def test_spaces_too_large_for_networks_are_refused_before_they_are_made(field):
    with pytest.raises(
        ValueError, match=rf"^{field}: got a space of [\d,]+ values, expected at most 1,000,000"
    ):
        PPO().make_networks(_TOO_LARGE[field])
