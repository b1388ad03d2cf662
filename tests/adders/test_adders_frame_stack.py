"""Observations that are stacks of pictures: stored once each, read as they were."""

import dm_env
import numpy as np
import pytest
import tree
from adder_steps import FIRST, LAST, MID, TABLE, feed, make_client, read
from hypothesis import given, settings
from hypothesis import strategies as st
from served_table import num_rows, table

from framework import adders, specs


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


def episodes(envs, time, k, fill, seed):
    """Step types ``[time, envs]`` and the observations of each time."""
    rng = np.random.default_rng(seed)
    kinds = [np.zeros(envs, np.int64)]
    for _ in range(time):
        kinds.append(np.where(kinds[-1] == LAST, FIRST, rng.choice([FIRST, MID, MID, MID, LAST], envs)))
    return np.array(kinds), list(stacks(np.array(kinds), k, fill, rng))


def items(make_adder, kinds, observations, flush, seed):
    """What an adder writes, of which no row stays."""
    client = make_client()
    adder = make_adder(client)
    play(adder, kinds, observations, flush, np.random.default_rng(seed))
    found = read(client)
    adder.close()
    assert num_rows(client) == 0
    return found


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


EPISODES = {
    "envs": st.integers(1, 3),
    "time": st.integers(2, 30),
    "k": st.integers(2, 4),
    "fill": st.sampled_from(["zeros", "repeated", "different"]),
    "flush": st.sampled_from([0, 0.3, 1]),
    "with_priorities": st.booleans(),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=40, deadline=None)
@given(**EPISODES, n=st.integers(1, 4))
def test_items_are_those_of_an_adder_that_stores_whole_stacks(
    envs, time, n, k, fill, flush, with_priorities, seed
):
    kinds, observations = episodes(envs, time, k, fill, seed)
    fns = {TABLE: (lambda items: items.observation["pixels"][:, 0, 0, 0]) if with_priorities else None}

    def make(frame_stack):
        return lambda client: adders.NStepTransitionAdder(
            client, n, 0.9, priority_fns=fns, frame_stack=frame_stack
        )

    found = [items(make(each), kinds, observations, flush, seed) for each in (None, k)]
    for whole, pictures in zip(*found, strict=True):
        tree.map_structure(np.testing.assert_array_equal, whole, pictures)


@pytest.mark.parametrize("size", [502, 100])
def test_a_transition_costs_one_picture_and_an_episode_one_more(size):
    client = make_client(table(TABLE, size))
    adder = adders.NStepTransitionAdder(client, 3, 0.99, frame_stack=4)
    kinds = np.array([[FIRST]] + [[MID]] * 499 + [[LAST]])
    play(adder, kinds, stacks(kinds, 4, "zeros", np.random.default_rng(0)), 0, np.random.default_rng(0))
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
    assert [item.next_observation.tolist() for item in read(client)] == [[1, 2], [2, 3]]


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
    **EPISODES,
    length=st.integers(1, 6),
    period=st.integers(1, 6),
    at_end=st.sampled_from(["continue", "zero_pad", "write"]),
)
def test_sequences_are_those_of_an_adder_that_stores_whole_stacks(
    envs, time, length, period, at_end, k, fill, flush, with_priorities, seed
):
    kinds, observations = episodes(envs, time, k, fill, seed)
    for t, observation in enumerate(observations):
        observation["age"] = np.full((envs, 2), t, np.float32)  # This leaf is not a stack.
    spec = {"pixels": specs.StackedArray((k, 2, 3), np.uint8), "age": specs.Array((2,), np.float32)}
    fns = {TABLE: (lambda items: items.observation["pixels"][:, -1, 0, 0, 0]) if with_priorities else None}

    def make(observation_spec):
        options = {"priority_fns": fns, "observation_spec": observation_spec}
        return lambda client: adders.SequenceAdder(client, length, min(period, length), at_end, **options)

    found = [items(make(each), kinds, observations, flush, seed) for each in (None, spec)]
    for whole, pictures in zip(*found, strict=True):
        batch = tree.map_structure(lambda leaf: leaf[None], pictures.observation)
        restacked = tree.map_structure(lambda leaf: leaf[0], adders.restacked(batch, length))
        tree.map_structure(np.testing.assert_array_equal, whole, pictures._replace(observation=restacked))


def test_overlapping_sequences_of_stacked_frames_cost_a_tenth_more_than_the_frames():
    """R2D2 writes such items; their recurrent states are stored once an item."""
    frame, state = (84, 84), np.zeros((2, 512), np.float32)
    client = make_client()
    spec = specs.StackedBoundedArray((4, *frame), np.uint8, 0, 255)
    options = {"extras_of_first_row": ["state"], "observation_spec": spec}
    adder = adders.SequenceAdder(client, 121, 40, "CONTINUE", **options)
    kinds = np.array([[FIRST if t % 200 == 0 else LAST if t % 200 == 199 else MID] * 2 for t in range(800)])
    ones = np.ones(2, np.float32)

    def steps():
        stack = np.ones((2, 4, *frame), np.uint8)
        for time, kind in enumerate(kinds):
            stack = np.concatenate([stack[:, 1:], np.full((2, 1, *frame), time % 255, np.uint8)], 1)
            if kind[0] == FIRST:
                stack[:, :-1] = 0
            yield np.zeros(2, np.int64), dm_env.TimeStep(kind, ones, ones, stack), {"state": state}

    feed(adder, steps())
    adder.flush()
    table = client.tables[TABLE]
    assert len(table) == 2 * ((800 - 121) // 40 + 1)
    stored = sum(stream.num_rows * stream.row_bytes for stream in client.store.streams.values())
    assert 84 * 84 < stored / (2 * 800) <= 1.1 * 84 * 84
    observation = client.sample_batch(TABLE, 4).data.observation
    assert adders.restacked(observation, 121).shape == (4, 121, 4, *frame)
    adder.close()
