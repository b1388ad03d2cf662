"""Wrappers, each against what it must do written out by hand."""

import copy
import functools

import dm_env
import numpy as np
import pytest
import torch
from dm_env import specs as dm_specs

from framework import environments, networks, specs
from framework.environments import FIRST, LAST, MID, testing
from framework.environments.single import env_seeds
from framework.networks import inputs


class Script(dm_env.Environment):
    """Plays given (reward, discount) pairs as one episode, over and over; observes the step's number."""

    def __init__(self, script):
        self._script = script

    def observation_spec(self):
        return dm_specs.Array((), np.float32, name="observation")

    def action_spec(self):
        return dm_specs.DiscreteArray(2, dtype=np.int64, name="action")

    def reset(self):
        self._time = 0
        return dm_env.restart(np.float32(0))

    def step(self, action):
        reward, discount = self._script[self._time]
        self._time += 1
        kind = dm_env.StepType.LAST if self._time == len(self._script) else dm_env.StepType.MID
        return dm_env.TimeStep(kind, reward, discount, np.float32(self._time))


class Pushed(dm_env.Environment):
    """Observes the action it got; bounds -2 ... 6 and 0 ... 1."""

    def __init__(self, dtype=np.float64, bounds=((-2.0, 0.0), (6.0, 1.0))):
        self._dtype = dtype
        self._bounds = bounds
        self._shape = np.shape(bounds[0])

    def observation_spec(self):
        return dm_specs.Array(self._shape, np.float64, name="observation")

    def action_spec(self):
        return dm_specs.BoundedArray(self._shape, self._dtype, *self._bounds, name="action")

    def reset(self):
        return dm_env.restart(np.zeros(self._shape))

    def step(self, action):
        assert action.dtype == self._dtype
        return dm_env.transition(0.0, action.astype(np.float64))


def _zeros(num_envs):
    return np.zeros(num_envs, np.int64)


@pytest.mark.parametrize("stepping", ["inline", "processes"])
def test_action_repeat_sums_rewards_and_stops_where_an_episode_ends(stepping):
    seeds = env_seeds(0, 2)

    def make(seed):
        """Env 0 has 5 steps an episode, env 1 has 4; rewards are 100 * observation."""
        return testing.EchoEnvironment(episode_length=5 - seeds.index(seed))

    repeat = functools.partial(environments.ActionRepeat, num_repeats=3)
    with environments.make(make, num_envs=2, seed=0, stepping=stepping, wrappers=[repeat]) as environment:
        environment.reset()
        timesteps = [[np.array(field).tolist() for field in environment.step(_zeros(2))] for _ in range(3)]
    first, second, third = timesteps
    assert first[:2] == [[MID, MID], [0 + 100 + 200] * 2]
    assert second == [[LAST, LAST], [300 + 400, 300], [0, 0], [[5], [4]]]
    assert third == [[FIRST, FIRST], [0, 0], [1, 1], [[6], [5]]]  # A reset is not repeated.


def test_action_repeat_discounts_later_rewards():
    script = [(1.0, 0.5), (2.0, 0.5), (4.0, 1.0), (8.0, 0.25)]
    repeat = functools.partial(environments.ActionRepeat, num_repeats=4)
    environment = environments.make(Script, options={"script": script}, wrappers=[repeat])
    environment.reset()
    timestep = environment.step(_zeros(1))
    assert timestep.reward.tolist() == [1 + 0.5 * 2 + 0.25 * 4 + 0.25 * 8]
    assert timestep.discount.tolist() == [0.5 * 0.5 * 1.0 * 0.25]
    assert timestep.step_type.tolist() == [LAST]


def test_step_limit_truncates_each_env_by_itself():
    lengths = iter([2, 10])
    environment = environments.make(
        lambda: testing.EchoEnvironment(episode_length=next(lengths)),
        num_envs=2,
        wrappers=[lambda e: environments.StepLimit(e, 3)],
    )
    environment.reset()
    timesteps = [copy.deepcopy(environment.step(_zeros(2))) for _ in range(8)]
    kinds = [timestep.step_type.tolist() for timestep in timesteps]
    assert [kind[0] for kind in kinds] == [MID, LAST, FIRST, MID, LAST, FIRST, MID, LAST]
    assert [kind[1] for kind in kinds] == [MID, MID, LAST, FIRST, MID, MID, LAST, FIRST]
    discounts = [timestep.discount.tolist() for timestep in timesteps]
    assert discounts == [[discount, 1] for discount in (1, 0, 1, 1, 0, 1, 1, 0)]
    assert [timestep.observation[1, 0] for timestep in timesteps] == list(range(1, 9))


def test_step_limit_starts_over_after_reset_and_leaves_terminations_alone():
    limit = functools.partial(environments.StepLimit, limit=3)
    environment = environments.make(testing.EchoEnvironment, options={"episode_length": 3}, wrappers=[limit])
    environment.reset()
    environment.step(_zeros(1))
    environment.reset()
    kinds = [environment.step(_zeros(1)) for _ in range(3)]
    assert kinds[-1].step_type.tolist() == [LAST] and kinds[-1].discount.tolist() == [0]


def test_clip_action():
    environment = environments.make(Pushed, num_envs=2, wrappers=[environments.ClipAction])
    environment.reset()
    timestep = environment.step(np.array([[-9.0, 0.5], [9.0, 7.0]]))
    assert timestep.observation.tolist() == [[-2.0, 0.5], [6.0, 1.0]]


@pytest.mark.parametrize("clip", [False, True])
def test_rescale_action(clip):
    environment = environments.make(
        Pushed, num_envs=3, wrappers=[functools.partial(environments.RescaleAction, clip=clip)]
    )
    spec = environment.action_spec()
    assert (spec.minimum == -1).all() and (spec.maximum == 1).all()
    environment.reset()
    timestep = environment.step(np.array([[-1.0, 1.0], [0.0, 0.0], [2.0, -1.0]], np.float32))
    assert timestep.observation.tolist() == [[-2.0, 1.0], [2.0, 0.5], [6.0 if clip else 10.0, 0.0]]


@pytest.mark.parametrize("clip", [False, True])
def test_rescaled_actions_are_within_the_bounds(clip):
    bounds = [(0.1 * low, 0.1 * high) for low in range(-30, 31) for high in range(low + 1, 31)]
    low, high = (np.array(each, np.float32) for each in zip(*bounds, (-9e29, 9e29), strict=True))
    environment = environments.make(
        functools.partial(Pushed, np.float32, (low, high)),
        wrappers=[functools.partial(environments.RescaleAction, clip=clip)],
    )
    environment.reset()
    for value in (-1.0, 1.0, *np.linspace(-1.0, 1.0, 7, dtype=np.float32)):
        given = environment.step(np.full((1, len(low)), value, np.float32)).observation[0]
        assert (low <= given).all() and (given <= high).all()
        assert value not in (-1, 1) or np.array_equal(given, low if value < 0 else high)


@pytest.mark.parametrize("largest", [np.inf, np.finfo(np.float32).max, np.finfo(np.float32).max / 2])
def test_rescaling_needs_finite_bounds(largest):
    def make():
        return Pushed(bounds=((-largest, 0.0), (6.0, 1.0)))

    with pytest.raises(ValueError, match=r"action cannot be rescaled.*not finite"):
        environments.make(make, wrappers=[environments.RescaleAction])


def test_frame_stack_starts_with_zeros_and_keeps_envs_apart():
    lengths = iter([2, 3])
    environment = environments.make(
        lambda: testing.EchoEnvironment(episode_length=next(lengths), first=1),
        num_envs=2,
        wrappers=[lambda e: environments.FrameStack(e, 3)],
    )
    assert environment.observation_spec().shape == (3, 1)
    stacks = [environment.reset().observation[..., 0].tolist()]
    stacks += [environment.step(_zeros(2)).observation[..., 0].tolist() for _ in range(4)]
    assert [stack[0] for stack in stacks] == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [0, 0, 4], [0, 4, 5]]
    assert [stack[1] for stack in stacks] == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [0, 0, 5]]


def test_frame_stack_of_nested_bounded_observations():
    spec = testing.make_spec(
        {"camera": specs.BoundedArray((2, 2), np.uint8, 5, 255), "joint": specs.Array((), np.float32)}
    )
    environment = environments.make(
        testing.FakeEnvironment, options={"spec": spec}, wrappers=[lambda e: environments.FrameStack(e, 2)]
    )
    stacked = environment.observation_spec()
    assert stacked["camera"].shape == (2, 2, 2) and (stacked["camera"].minimum == 0).all()
    observation = environment.reset().observation
    assert observation["camera"].dtype == np.uint8 and observation["joint"].shape == (1, 2)
    assert not observation["camera"][:, 0].any()


def test_one_hot_planes():
    codes = specs.BoundedArray((1, 2, 2), np.uint8, 0, [[[2, 1], [2, 0]]])
    spec = testing.make_spec({"image": codes, "direction": specs.DiscreteArray(4)})
    make = functools.partial(
        environments.make, functools.partial(testing.FakeEnvironment, spec), num_envs=3, seed=1
    )
    planes = make(wrappers=[environments.OneHotPlanes])
    shape = planes.observation_spec()["image"]
    assert shape.shape == (5, 1, 2) and shape.dtype == np.float32 and shape.maximum == 1
    plain = make()
    ours, theirs = planes.reset(), plain.reset()
    for _ in range(20):
        np.testing.assert_array_equal(ours.observation["direction"], theirs.observation["direction"])
        assert ours.observation["image"].dtype == np.float32
        for env, row, column in np.ndindex(3, 1, 2):
            kind, color = theirs.observation["image"][env, row, column]
            by_hand = [kind == 0, kind == 1, kind == 2, color == 0, color == 1]
            assert ours.observation["image"][env, :, row, column].tolist() == by_hand
        ours, theirs = (each.step(np.zeros(3, np.int64)) for each in (planes, plain))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (specs.BoundedArray((4, 4, 3), np.uint8, 0, 255), "observation: got codes from 0 to 255"),
        (specs.Array((4, 4, 3), np.float32), "expected bounded integers of three axes"),
    ],
    ids=["picture", "numbers"],
)
def test_one_hot_planes_without_codes(spec, says):
    factory = functools.partial(testing.FakeEnvironment, testing.make_spec(spec))
    with pytest.raises(ValueError, match=says):
        environments.make(factory, wrappers=[environments.OneHotPlanes])


def test_single_precision():
    environment = environments.make(Pushed, num_envs=2, wrappers=[environments.SinglePrecision])
    assert environment.observation_spec().dtype == environment.action_spec().dtype == np.float32
    assert environment.reset().observation.dtype == np.float32
    timestep = environment.step(np.full((2, 2), 0.1, np.float32))
    assert timestep.observation.dtype == np.float32


def test_scale_observation_scales_floats_and_their_bounds():
    numbers = specs.BoundedArray((2,), np.float32, -3, 5)
    spec = testing.make_spec({"a": numbers, "b": specs.Array((), np.float64), "c": specs.DiscreteArray(4)})
    make = functools.partial(
        environments.make, functools.partial(testing.FakeEnvironment, spec), num_envs=2, seed=1
    )
    scaled = make(wrappers=[functools.partial(environments.ScaleObservation, scale=0.5)])
    ours, theirs = scaled.reset().observation, make().reset().observation
    for name, factor in {"a": 0.5, "b": 0.5, "c": 1}.items():
        np.testing.assert_allclose(ours[name], factor * theirs[name], rtol=1e-6)
        assert ours[name].dtype == scaled.observation_spec()[name].dtype
    assert (scaled.observation_spec()["a"].minimum == -1.5).all()
    assert (scaled.observation_spec()["a"].maximum == 2.5).all()
    with pytest.raises(ValueError, match=r"^scale: got 0, expected"):
        make(wrappers=[functools.partial(environments.ScaleObservation, scale=0)])


_PARTS = {  # The spec, and what its kind is called where networks would take it for a picture.
    "picture": (specs.BoundedArray((4, 4, 3), np.uint8, 0, 255), "bytes"),
    "bytes without bounds": (specs.Array((5,), np.uint8), None),
    "bytes as int64": (specs.BoundedArray((5,), np.int64, 0, 255), None),
    "cells": (specs.BoundedArray((4, 4, 3), np.uint8, 0, 10), "numbers"),
    "code": (specs.DiscreteArray(4), None),
    "numbers": (specs.BoundedArray((2, 3), np.float64, 0, 255), None),
}


@pytest.mark.parametrize("num_frames", [None, 2])
@pytest.mark.parametrize("name", _PARTS)
def test_networks_see_the_same_numbers_of_what_is_flattened(name, num_frames):
    spec, kind = _PARTS[name]
    stack = [functools.partial(environments.FrameStack, num_frames=num_frames)] if num_frames else []
    options = {"num_envs": 3, "options": {"spec": testing.make_spec({"part": spec})}, "seed": 1}
    seen = []
    for wrappers in (stack, [*stack, environments.Flatten]):
        environment = environments.make(testing.FakeEnvironment, wrappers=wrappers, **options)
        named = [f"observation/part={kind}"] if kind and wrappers == stack else []
        encoder = networks.ObservationEncoder(inputs.declared(environment.observation_spec(), named))
        environment.reset()
        observation = environment.step(np.zeros(3, np.int64)).observation
        seen.append(encoder(networks.as_tensors(observation)))
    torch.testing.assert_close(*seen)


def test_flatten_concatenates_and_codes_discrete_values():
    pair = specs.Array((2, 2), np.float64), specs.BoundedArray((1,), np.int8, 0, 9)
    spec = testing.make_spec({"b": specs.DiscreteArray(3, np.int64), "a": pair})
    inner = environments.make(testing.FakeEnvironment, num_envs=3, options={"spec": spec}, seed=1)
    options = {"num_envs": 3, "options": {"spec": spec}, "seed": 1}
    outer = environments.make(testing.FakeEnvironment, wrappers=[environments.Flatten], **options)
    assert outer.observation_spec() == specs.Array((8,), np.float32, name="observation")
    plain, flat = inner.reset().observation, outer.reset().observation
    for env in range(3):
        expected = [*plain["a"][0][env].ravel(), *plain["a"][1][env], *np.eye(3)[plain["b"][env]]]
        np.testing.assert_allclose(flat[env], np.asarray(expected, np.float32))


def test_wrappers_apply_in_the_order_given_and_pass_things_on():
    limit = functools.partial(environments.StepLimit, limit=2)
    stack = functools.partial(environments.FrameStack, num_frames=2)
    options = {"num_envs": 2, "seed": 0, "render_mode": "rgb_array", "stepping": "inline"}
    wrappers = [limit, stack, environments.Flatten]
    environment = environments.make("gymnasium:CartPole-v1", wrappers=wrappers, **options)
    assert environment.observation_spec().shape == (8,)
    environment.reset()
    kinds = [environment.step(_zeros(2)).step_type.tolist() for _ in range(3)]
    assert kinds == [[MID] * 2, [LAST] * 2, [FIRST] * 2]
    assert environment.render().ndim == 3
    environment.close()


_WRONG = {
    "repeats": ([lambda e: environments.ActionRepeat(e, 0)], ValueError, "num_repeats: got 0"),
    "limit": ([lambda e: environments.StepLimit(e, 0)], ValueError, "limit: got 0"),
    "frames": ([lambda e: environments.FrameStack(e, 0)], ValueError, "num_frames: got 0"),
    "order": (
        [environments.SinglePrecision, lambda e: environments.ActionRepeat(e, 2)],
        NotImplementedError,
        "put ActionRepeat innermost",
    ),
}


@pytest.mark.parametrize(("wrappers", "error", "message"), _WRONG.values(), ids=_WRONG)
def test_wrong_arguments(wrappers, error, message):
    with pytest.raises(error, match=message):
        environments.make(testing.EchoEnvironment, wrappers=wrappers)


def test_observation_action_reward():
    clipped = functools.partial(environments.ObservationActionReward, reward_clip=150.0)
    options = {"num_envs": 2, "options": {"episode_length": 2}}
    environment = environments.make(testing.EchoEnvironment, wrappers=[clipped], **options)
    assert environment.observation_spec()["action"].num_values == 4
    timestep = environment.reset()
    seen = [copy.deepcopy(timestep.observation)]
    for action in ([1, 2], [3, 0], [1, 1], [2, 3]):  # the third is ignored: both envs start an episode
        timestep = environment.step(np.array(action))
        seen.append(copy.deepcopy(timestep.observation))
    assert [o["action"].tolist() for o in seen] == [[0, 0], [1, 2], [3, 0], [0, 0], [2, 3]]
    assert [o["reward"].tolist() for o in seen] == [[0, 0], [1, 2], [103, 100], [0, 0], [150, 150]]
    assert [o["observation"][0, 0] for o in seen] == [0, 1, 2, 3, 4]
    assert timestep.reward.tolist() == [302, 303]  # as it is
    without = functools.partial(clipped, action=False)
    environment = environments.make(testing.EchoEnvironment, wrappers=[without], **options)
    seen = environment.reset().observation
    assert set(environment.observation_spec()) == set(seen) == {"observation", "reward"}
    with pytest.raises(ValueError, match="reward_clip: got 0"):
        environments.ObservationActionReward(environment, reward_clip=0)
