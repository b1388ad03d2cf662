"""Observations that are stacks of pictures: stored once each, read as they were."""

import dm_env
import numpy as np
import pytest
import tree
from adder_items import TABLE, drain, make_client
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.r2d2 import R2D2, R2D2Config
from framework import adders, replay, specs
from framework.specs import EnvironmentSpec

FIRST, MID, LAST = 0, 1, 2


def stacks(kinds, k, fill, rng):
    """Observations ``[time, B, k, 2, 3]`` for step types ``[time, B]``."""
    stack = np.zeros((kinds.shape[1], k, 2, 3), np.uint8)
    for row in kinds:
        picture = rng.integers(1, 255, (len(row), 2, 3)).astype(np.uint8)
        stack = np.concatenate([stack[:, 1:], picture[:, None]], axis=1)
        for env in np.flatnonzero(row == FIRST):
            stack[env, :-1] = {"zeros": 0, "repeated": picture[env]}.get(fill, rng.integers(1, 255))
            if fill == "different":
                stack[env] = rng.integers(1, 255, stack[env].shape)
        yield {"pixels": stack.copy()}


def play(adder, kinds, observations, flush, rng):
    for t, (row, observation) in enumerate(zip(kinds, observations, strict=True)):
        ones = np.ones(len(row), np.float32)
        timestep = dm_env.TimeStep(row, ones * t, ones, observation)
        if t == 0:
            adder.add_first(timestep)
        else:
            adder.add(np.full(len(row), t), timestep)
        if rng.random() < flush:
            adder.flush_pending()


@settings(max_examples=40, deadline=None)
@given(
    envs=st.integers(1, 3),
    time=st.integers(2, 25),
    n=st.integers(1, 4),
    k=st.integers(2, 4),
    fill=st.sampled_from(["zeros", "repeated", "different"]),
    flush=st.sampled_from([0, 0.3, 1]),
    with_priorities=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_items_are_those_of_an_adder_that_stores_whole_stacks(
    envs, time, n, k, fill, flush, with_priorities, seed
):
    rng = np.random.default_rng(seed)
    kinds = [np.zeros(envs, np.int64)]
    for _ in range(time):
        kinds.append(np.where(kinds[-1] == LAST, FIRST, rng.choice([FIRST, MID, MID, MID, LAST], envs)))
    kinds = np.array(kinds)
    observations = list(stacks(kinds, k, fill, rng))
    fns = {TABLE: (lambda items: items.observation["pixels"][:, 0, 0, 0]) if with_priorities else None}
    found = []
    for frame_stack in (None, k):
        client = make_client()
        adder = adders.NStepTransitionAdder(client, n, 0.9, priority_fns=fns, frame_stack=frame_stack)
        play(adder, kinds, observations, flush, np.random.default_rng(seed))
        found.append(drain(client))
        adder.close()
        assert all(stream.num_rows == 0 for stream in client.store.streams.values())
    assert len(found[0]) == len(found[1])
    for whole, pictures in zip(*found, strict=True):
        tree.map_structure(np.testing.assert_array_equal, whole, pictures)


@pytest.mark.parametrize("size", [502, 100])
def test_a_transition_costs_one_picture_and_an_episode_one_more(size):
    client = replay.EmbeddedClient(
        [
            replay.Table(
                TABLE,
                replay.selectors.Uniform(),
                replay.selectors.Fifo(),
                size,
                replay.rate_limiters.MinSize(1),
            )
        ]
    )
    adder = adders.NStepTransitionAdder(client, 3, 0.99, frame_stack=4)
    kinds = np.array([[FIRST]] + [[MID]] * 499 + [[LAST]])
    observations = stacks(kinds, 4, "zeros", np.random.default_rng(0))
    for kind, observation in zip(kinds, observations, strict=True):
        timestep = dm_env.TimeStep(kind, np.ones(1, np.float32), np.ones(1, np.float32), observation)
        if kind[0] == FIRST:
            adder.add_first(timestep)
        else:
            adder.add(np.zeros(1, np.int64), timestep)
    assert client.sample_batch(TABLE, 8).data.observation["pixels"].shape == (8, 4, 2, 3)
    # 501 observations and the black picture that fills up the first stack; those of the last block stay.
    assert 0 <= client.store.streams["frames"].num_rows - size <= (0 if size == 502 else 256)
    assert client.server_info()[TABLE].current_size == size


def test_an_observation_that_does_not_continue_the_stack_is_an_error_and_is_not_taken():
    client = make_client()
    adder = adders.NStepTransitionAdder(client, 1, 0.9, frame_stack=2)
    adder.add_first(dm_env.restart(np.array([0, 1], np.uint8)))
    adder.add(0, dm_env.transition(1.0, np.array([1, 2], np.uint8)))
    with pytest.raises(ValueError, match="continue the previous step's stack"):
        adder.add(0, dm_env.transition(1.0, np.array([7, 8], np.uint8)))
    adder.add(0, dm_env.transition(1.0, np.array([2, 3], np.uint8)))
    assert [item.next_observation.tolist() for item in drain(client)] == [[1, 2], [2, 3]]


@pytest.mark.parametrize("frame_stack, shape", [(3, (4, 2)), (1, (4, 2)), (2, ())])
def test_a_number_of_pictures_that_does_not_fit(frame_stack, shape):
    with pytest.raises(ValueError, match="frame_stack"):
        adder = adders.NStepTransitionAdder(make_client(), 1, 0.9, frame_stack=frame_stack)
        try:
            adder.add_first(dm_env.restart(np.zeros(shape, np.uint8)))
        finally:
            assert adder.close() == 0


@settings(max_examples=40, deadline=None)
@given(
    envs=st.integers(1, 3),
    time=st.integers(2, 30),
    length=st.integers(1, 6),
    period=st.integers(1, 6),
    k=st.integers(2, 4),
    fill=st.sampled_from(["zeros", "repeated", "different"]),
    flush=st.sampled_from([0, 0.3, 1]),
    with_priorities=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_sequences_are_those_of_an_adder_that_stores_whole_stacks(
    envs, time, length, period, k, fill, flush, with_priorities, seed
):
    rng = np.random.default_rng(seed)
    kinds = [np.zeros(envs, np.int64)]
    for _ in range(time):
        kinds.append(np.where(kinds[-1] == LAST, FIRST, rng.choice([FIRST, MID, MID, MID, LAST], envs)))
    kinds = np.array(kinds)
    # The other leaf is not a stack.
    observations = [
        {**stack, "age": np.full((envs, 2), t, np.float32)}
        for t, stack in enumerate(stacks(kinds, k, fill, rng))
    ]
    spec = {
        "pixels": specs.StackedArray((k, 2, 3), np.uint8),
        "age": specs.Array((2,), np.float32),
    }
    fns = {TABLE: (lambda items: items.observation["pixels"][:, -1, 0, 0, 0]) if with_priorities else None}
    found = []
    for observation_spec in (None, spec):
        client = make_client()
        adder = adders.SequenceAdder(
            client,
            length,
            min(period, length),
            "continue",
            priority_fns=fns,
            observation_spec=observation_spec,
        )
        play(adder, kinds, observations, flush, np.random.default_rng(seed))
        found.append(drain(client))
        adder.close()
        assert all(stream.num_rows == 0 for stream in client.store.streams.values())
    assert len(found[0]) == len(found[1])
    for whole, pictures in zip(*found, strict=True):
        batch = tree.map_structure(lambda leaf: leaf[None], pictures.observation)
        restacked = tree.map_structure(lambda leaf: leaf[0], adders.restacked(batch, length))
        tree.map_structure(np.testing.assert_array_equal, whole, pictures._replace(observation=restacked))


def test_overlapping_sequences_of_stacked_atari_frames_cost_a_tenth_more_than_the_frames():
    agent = R2D2(R2D2Config(unroll_length=80, burn_in=40, period=40, lstm_size=512))
    client = make_client()
    spec = EnvironmentSpec(
        {
            "observation": specs.StackedBoundedArray((4, 84, 84), np.uint8, 0, 255),
            "reward": specs.Array((), np.float32),
        },
        specs.DiscreteArray(4),
        specs.Array((), np.float32),
        specs.Array((), np.float32),
    )
    adder = agent.make_adder(client, spec)
    state = tuple(np.zeros((2, 512), np.float32) for _ in range(2))
    ones, stack = np.ones(2, np.float32), np.zeros((2, 4, 84, 84), np.uint8)
    for time in range(800):
        stack = np.concatenate([stack[:, 1:], np.full((2, 1, 84, 84), time % 255 + 1, np.uint8)], 1)
        kind = FIRST if time % 200 == 0 else LAST if time % 200 == 199 else MID
        if kind == FIRST:
            stack[:, :-1] = 0
        timestep = dm_env.TimeStep(np.full(2, kind), ones, ones, {"observation": stack, "reward": ones})
        if time == 0:
            adder.add_first(timestep)
        else:
            adder.add(np.zeros(2, np.int64), timestep, {"state": state})
    adder.flush()
    table = client.table(TABLE)
    assert len(table) == 2 * ((800 - 121) // 40 + 1)
    stored = sum(stream.num_rows * stream.row_bytes for stream in client.store.streams.values())
    books = sum(array.nbytes for array in vars(table._items).values() if isinstance(array, np.ndarray))
    stored += books * len(table) / len(table._items.state)
    assert 84 * 84 < stored / (2 * 800) <= 1.1 * 84 * 84
    observation = client.sample_batch(TABLE, 4).data.observation["observation"]
    assert adders.restacked(observation, 121).shape == (4, 121, 4, 84, 84)
    adder.close()
