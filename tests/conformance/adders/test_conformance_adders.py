"""What Acme's adders write, case by case; for one lane and for several lanes that are out of phase.

The expected items are those of Acme's own adder tests and of runs of its adders. Observations are 1, 2, 3
..., the last step of an episode is a termination (discount 0) unless a case says otherwise.
"""

import dataclasses
from typing import Any

import dm_env
import numpy as np
import pytest
import tree
from dm_env import specs

from framework import adders, replay
from framework.specs import EnvironmentSpec
from framework.types import Step, Transition

TABLE = adders.DEFAULT_TABLE


def make_client():
    return replay.embedded.EmbeddedClient([replay.Table.queue(TABLE, 1000)])


def drain(client):
    items = []
    while client.can_sample(TABLE, 1):
        sample = client.sample_batch(TABLE, 1, timeout=0, pad=True)
        lengths = getattr(sample, "lengths", None)
        if lengths is None:
            items.append(tree.map_structure(lambda x: x[0], sample.data))
        else:
            items.append(
                tree.map_structure(lambda x, n: x[0] if n is None else x[0, : n[0]], sample.data, lengths)
            )
    return items


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


def feed_lanes(adder, episodes, lanes, extras=None):
    """Every lane plays the same steps, lane b after b more FIRST steps: no two lanes end at the same time."""
    timeline = [step for steps in episodes for step in steps]
    index = {id(step): i - 1 for steps in episodes for i, step in enumerate(steps)}
    real = timeline[1]
    rows = []
    for b in range(lanes):
        wait = [timeline[0]] * b
        rows.append(wait + timeline + [None] * (lanes - b))
    began = False
    for column in zip(*rows, strict=True):
        if all(step is None for step in column):
            break
        # A lane that has played all its steps is reset; its open episode has no transition.
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
        adder.add(np.arange(lanes, dtype=np.int32), timestep, extra)


def check(items, expected):
    assert len(items) == len(expected)
    for item, want in zip(items, expected, strict=True):
        tree.assert_same_structure(item, want)
        tree.map_structure(lambda x, y: np.testing.assert_array_almost_equal(x, y, decimal=6), item, want)
        tree.map_structure(lambda x, y: _same_shape(x, y), item, want)


def _same_shape(x, y):
    assert np.shape(x) == np.shape(y)


def check_lanes(items, expected, lanes):
    """``feed_lanes`` takes the lane's number as its action: each lane has the expected items in order."""
    assert {int(np.ravel(item.action)[0]) for item in items} == (set(range(lanes)) if expected else set())
    for lane in range(lanes):
        own = [item for item in items if np.ravel(item.action)[0] == lane]
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


# --- n-step transitions ---


@dataclasses.dataclass
class TransitionCase:
    name: str
    n: int
    g: float
    rewards: list
    expected: list  # (observation, R, D, next observation[, extras])
    discounts: list | None = None
    observe: Any = array
    extras: Any = None


def dict_observation(i):
    return {"foo": array(i), "bar": (array(10 * i), array([i, i]))}


HALF = [0.5, 0.5, 0.0]
PAIR = (1.0, 2.0)
TRANSITIONS = [
    TransitionCase("OneStepFinalReward", 1, 1.0, [0, 0, 1], [(1, 0, 1, 2), (2, 0, 1, 3), (3, 1, 0, 4)]),
    TransitionCase(
        "OneStepDict", 1, 1.0, [0, 0, 1], [(1, 0, 1, 2), (2, 0, 1, 3), (3, 1, 0, 4)], observe=dict_observation
    ),
    TransitionCase(
        "OneStepExtras",
        1,
        1.0,
        [0, 0, 1],
        [(1, 0, 1, 2, {"state": 0}), (2, 0, 1, 3, {"state": 1}), (3, 1, 0, 4, {"state": 2})],
        extras=lambda i: {"state": array(i)},
    ),
    TransitionCase(
        "OneStepExtrasZeroes",
        1,
        1.0,
        [0, 0, 1],
        [(1, 0, 1, 2, [0.0]), (2, 0, 1, 3, [0.0]), (3, 1, 0, 4, [0.0])],
        extras=lambda i: np.zeros(1, np.float32),
    ),
    TransitionCase(
        "OneStepExtrasWithoutDimensions",
        1,
        1.0,
        [0, 1],
        [(1, 0, 1, 2, 7.0), (2, 1, 0, 3, 8.0)],
        extras=lambda i: np.array(7 + i, np.float32),
    ),
    TransitionCase(
        "TwoStep",
        2,
        1.0,
        [1, 1, 1],
        [(1, 1, 0.5, 2), (1, 1.5, 0.25, 3), (2, 1.5, 0, 4), (3, 1, 0, 4)],
        discounts=HALF,
    ),
    TransitionCase(
        "TwoStepStructuredReward",
        2,
        1.0,
        [PAIR] * 3,
        [
            (1, (1, 2), (0.5, 0.5), 2),
            (1, (1.5, 3), (0.25, 0.25), 3),
            (2, (1.5, 3), (0.0, 0.0), 4),
            (3, (1, 2), (0.0, 0.0), 4),
        ],
        discounts=HALF,
    ),
    TransitionCase(
        "TwoStepNDArrayReward",
        2,
        1.0,
        [np.array(PAIR)] * 3,
        [(1, [1, 2], 0.5, 2), (1, [1.5, 3], 0.25, 3), (2, [1.5, 3], 0, 4), (3, [1, 2], 0, 4)],
        discounts=HALF,
    ),
    TransitionCase(
        "TwoStepStructuredDiscount",
        2,
        1.0,
        [1, 1, 1],
        [
            (1, {"a": 1, "b": 1}, {"a": 0.5, "b": 0.1}, 2),
            (1, {"a": 1.5, "b": 1.1}, {"a": 0.25, "b": 0.01}, 3),
            (2, {"a": 1.5, "b": 1.1}, {"a": 0, "b": 0}, 4),
            (3, {"a": 1, "b": 1}, {"a": 0, "b": 0}, 4),
        ],
        discounts=[{"a": 0.5, "b": 0.1}, {"a": 0.5, "b": 0.1}, {"a": 0.0, "b": 0.0}],
    ),
    TransitionCase(
        "TwoStepNDArrayDiscount",
        2,
        1.0,
        [1, 1, 1],
        [
            (1, [1, 1], [0.5, 0.1], 2),
            (1, [1.5, 1.1], [0.25, 0.01], 3),
            (2, [1.5, 1.1], [0, 0], 4),
            (3, [1, 1], [0, 0], 4),
        ],
        discounts=[np.array([0.5, 0.1]), np.array([0.5, 0.1]), np.array([0.0, 0.0])],
    ),
    TransitionCase(
        "TwoStepBroadcastedNDArrays",
        2,
        1.0,
        [np.array([[1.0, 2.0]])] * 3,
        [
            (1, [[1, 2], [1, 2]], [[0.5], [0.1]], 2),
            (1, [[1.5, 3], [1.1, 2.2]], [[0.25], [0.01]], 3),
            (2, [[1.5, 3], [1.1, 2.2]], [[0], [0]], 4),
            (3, [[1, 2], [1, 2]], [[0], [0]], 4),
        ],
        discounts=[np.array([[0.5], [0.1]]), np.array([[0.5], [0.1]]), np.zeros((2, 1))],
    ),
    TransitionCase(
        "TwoStepStructuredBroadcastedNDArrays",
        2,
        1.0,
        [{"a": np.array([[1.0, 2.0]])}] * 3,
        [
            (1, {"a": [[1, 2], [1, 2]]}, {"a": [[0.5], [0.1]]}, 2),
            (1, {"a": [[1.5, 3], [1.1, 2.2]]}, {"a": [[0.25], [0.01]]}, 3),
            (2, {"a": [[1.5, 3], [1.1, 2.2]]}, {"a": [[0], [0]]}, 4),
            (3, {"a": [[1, 2], [1, 2]]}, {"a": [[0], [0]]}, 4),
        ],
        discounts=[{"a": np.array([[0.5], [0.1]])}] * 2 + [{"a": np.zeros((2, 1))}],
    ),
    TransitionCase(
        "TwoStepWithExtras",
        2,
        1.0,
        [1, 1, 1],
        [
            (1, 1, 0.5, 2, {"state": 0}),
            (1, 1.5, 0.25, 3, {"state": 0}),
            (2, 1.5, 0, 4, {"state": 1}),
            (3, 1, 0, 4, {"state": 2}),
        ],
        discounts=HALF,
        extras=lambda i: {"state": array(i)},
    ),
    TransitionCase(
        "ThreeStepDiscounted",
        3,
        0.4,
        [1, 1, 1],
        [(1, 1, 0.5, 2), (1, 1.2, 0.1, 3), (1, 1.24, 0, 4), (2, 1.2, 0, 4), (3, 1, 0, 4)],
        discounts=HALF,
    ),
    TransitionCase(
        "ThreeStepVaryingReward",
        3,
        0.5,
        [2, 3, 5, 7],
        [(1, 2, 1, 2), (1, 3.5, 0.5, 3), (1, 4.75, 0.25, 4), (2, 7.25, 0, 5), (3, 8.5, 0, 5), (4, 7, 0, 5)],
    ),
    TransitionCase("SingleTransitionEpisode", 4, 1.0, [1], [(1, 1, 0, 2)]),
    TransitionCase("EpisodeShorterThanN", 4, 1.0, [1, 1], [(1, 1, 1, 2), (1, 2, 0, 3), (2, 1, 0, 3)]),
    TransitionCase("EpisodeEqualToN", 2, 1.0, [1, 1], [(1, 1, 1, 2), (1, 2, 0, 3), (2, 1, 0, 3)]),
    TransitionCase(
        "EpisodeOneLongerThanAThreeStepWindowNeeds",
        3,
        1.0,
        [1, 1],
        [(1, 1, 1, 2), (1, 2, 0, 3), (2, 1, 0, 3)],
    ),
]


def transitions(case):
    result = []
    for observation, reward, discount, following, *extras in case.expected:
        result.append(
            Transition(
                case.observe(observation),
                np.int32(0),
                array(reward),
                array(discount),
                case.observe(following),
                array(extras[0]) if extras else (),
            )
        )
    return result


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("case", TRANSITIONS, ids=lambda case: case.name)
def test_transitions(case, repeat):
    client = make_client()
    adder = adders.NStepTransitionAdder(client, case.n, case.g)
    steps = episode(case.rewards, case.discounts, observe=case.observe)
    feed_single(adder, [steps] * repeat, case.extras)
    items = drain(client)
    check(items, transitions(case) * repeat)
    spec = EnvironmentSpec(
        spec_like(steps[0][3]), spec_like(np.int32(0)), spec_like(steps[1][1]), spec_like(steps[1][2])
    )
    extras_spec = () if case.extras is None else spec_like(case.extras(0))
    check_signature(items, adders.NStepTransitionAdder.signature(spec, extras_spec))


@pytest.mark.parametrize("case", TRANSITIONS, ids=lambda case: case.name)
def test_transitions_of_lanes_out_of_phase(case):
    client = make_client()
    adder = adders.NStepTransitionAdder(client, case.n, case.g)
    feed_lanes(adder, [episode(case.rewards, case.discounts, observe=case.observe)] * 2, 3, case.extras)
    check_lanes(drain(client), transitions(case) * 2, 3)


# --- sequences ---


@dataclasses.dataclass
class SequenceCase:
    name: str
    length: int
    period: int
    behavior: str
    steps: int
    expected: list  # observations of the items' rows; "0" is padding
    episodes: int = 1
    truncated: bool = False


SEQUENCES = [
    SequenceCase("PeriodOne", 3, 1, "ZERO_PAD", 4, ["123", "234", "345"]),
    SequenceCase("PeriodTwo", 3, 2, "ZERO_PAD", 4, ["123", "345"]),
    SequenceCase("EarlyTerminationPeriodOne", 3, 1, "ZERO_PAD", 2, ["123"]),
    SequenceCase("EarlyTerminationPeriodTwo", 3, 2, "ZERO_PAD", 2, ["123"]),
    SequenceCase("EarlyTerminationPaddingPeriodOne", 4, 1, "ZERO_PAD", 2, ["1230"]),
    SequenceCase("EarlyTerminationPaddingPeriodTwo", 4, 2, "ZERO_PAD", 2, ["1230"]),
    SequenceCase("EarlyTerminationNoPadding", 4, 1, "TRUNCATE", 2, ["123"]),
    SequenceCase("LongEpisodePadding", 3, 3, "ZERO_PAD", 7, ["123", "456", "780"]),
    SequenceCase("LongEpisodeNoPadding", 3, 3, "TRUNCATE", 7, ["123", "456", "78"]),
    SequenceCase("EndBehaviorWrite", 3, 2, "WRITE", 5, ["123", "345", "456"]),
    SequenceCase("ContinueOneEpisode", 3, 2, "CONTINUE", 7, ["123", "345", "567"]),
    SequenceCase(
        "ContinueMultipleTerminated",
        3,
        2,
        "CONTINUE",
        6,
        ["123", "345", "567", "712", "234", "456", "671", "123", "345", "567"],
        episodes=3,
    ),
    SequenceCase(
        "ContinueMultipleTruncated",
        3,
        2,
        "CONTINUE",
        6,
        ["123", "345", "567", "712", "234", "456", "671", "123", "345", "567"],
        episodes=3,
        truncated=True,
    ),
    SequenceCase("L3p2T3ZeroPad", 3, 2, "ZERO_PAD", 3, ["123", "340"]),
    SequenceCase("L3p2T3Truncate", 3, 2, "TRUNCATE", 3, ["123", "34"]),
    SequenceCase("L3p2T3Write", 3, 2, "WRITE", 3, ["123", "234"]),
    SequenceCase("L4p2T2Truncate", 4, 2, "TRUNCATE", 2, ["123"]),
    SequenceCase("L4p2T2Write", 4, 2, "WRITE", 2, []),
    SequenceCase("L3p3T3Write", 3, 3, "WRITE", 3, ["123", "234"]),
    # Acme writes one more item here, "400" and "4", in which nothing ever happened.
    SequenceCase("L3p3T3ZeroPadWithoutTheEmptyItem", 3, 3, "ZERO_PAD", 3, ["123"]),
    SequenceCase("L3p3T3TruncateWithoutTheEmptyItem", 3, 3, "TRUNCATE", 3, ["123"]),
]


def sequences(case):
    """Items of an episode whose rewards are 10, 20, ...: row i has reward 10 i, the closing row zeros."""
    last = case.steps
    result = []
    for rows in case.expected:
        numbers = np.array([int(digit) for digit in rows])
        real = (numbers >= 1) & (numbers <= last)
        discount = np.where(real & ((numbers < last) | case.truncated), 1, 0)
        result.append(
            Step(
                observation=numbers.astype(np.float32),
                action=np.where(real, numbers, 0).astype(np.int32),
                reward=np.where(real, 10 * numbers, 0).astype(np.float32),
                discount=discount.astype(np.float32),
                start_of_episode=numbers == 1,
                extras={"e": np.where(real, numbers + 0.5, 0).astype(np.float32)},
                mask=real.astype(np.float32),
            )
        )
    return result


def feed_sequences(adder, case, lanes=None):
    for _ in range(case.episodes):
        for i in range(case.steps + 1):
            kind = FIRST if i == 0 else LAST if i == case.steps else MID
            end = i == case.steps and not case.truncated
            values = (np.float32(10 * i), np.float32(0 if end else 1), np.float32(i + 1))
            action, extras = np.int32(i), {"e": np.float32(i + 0.5)}
            if lanes is not None:
                values = tuple(np.full(lanes, value) for value in values)
                action, extras = np.full(lanes, action), {"e": np.full(lanes, extras["e"])}
            timestep = dm_env.TimeStep(kind if lanes is None else np.full(lanes, kind), *values)
            if i == 0:
                adder.add_first(timestep)
            else:
                adder.add(action, timestep, extras)


FIRST, MID, LAST = dm_env.StepType.FIRST, dm_env.StepType.MID, dm_env.StepType.LAST


@pytest.mark.parametrize("case", SEQUENCES, ids=lambda case: case.name)
def test_sequences(case):
    client = make_client()
    adder = adders.SequenceAdder(client, case.length, case.period, case.behavior)
    feed_sequences(adder, case)
    items = drain(client)
    check(items, sequences(case))
    length = None if case.behavior == "TRUNCATE" else case.length
    one = specs.Array((), np.float32)
    spec = EnvironmentSpec(one, specs.Array((), np.int32), one, one)
    check_signature(items, adders.SequenceAdder.signature(spec, {"e": one}, sequence_length=length))


# CONTINUE runs on from episode to episode, so these two say nothing about it.
BREAKING = [case for case in SEQUENCES if case.behavior != "CONTINUE"]


@pytest.mark.parametrize("case", BREAKING, ids=lambda case: case.name)
def test_sequences_twice_in_one_adder(case):
    client = make_client()
    adder = adders.SequenceAdder(client, case.length, case.period, case.behavior)
    feed_sequences(adder, dataclasses.replace(case, episodes=2))
    check(drain(client), sequences(case) * 2)


@pytest.mark.parametrize("case", SEQUENCES, ids=lambda case: case.name)
def test_sequences_of_lanes_in_phase(case):
    client = make_client()
    adder = adders.SequenceAdder(client, case.length, case.period, case.behavior)
    feed_sequences(adder, case, lanes=3)
    # The order is that of the calls, then of the lanes: sorting makes it easy to say what must be there.
    check(sorted(drain(client), key=str), sorted(sequences(case) * 3, key=str))


@pytest.mark.parametrize("case", BREAKING, ids=lambda case: case.name)
def test_sequences_of_lanes_out_of_phase(case):
    client = make_client()
    adder = adders.SequenceAdder(client, case.length, case.period, case.behavior)
    steps = episode([10.0 * (i + 1) for i in range(case.steps)], truncated=case.truncated)
    feed_lanes(adder, [steps] * 2, 3)
    expected = [
        item._replace(action=np.zeros(len(item.reward), np.int32), extras=()) for item in sequences(case)
    ]
    check_lanes(drain(client), expected * 2, 3)


# --- episodes ---


@pytest.mark.parametrize("longest", [2, 10, 50])
def test_episode_of_the_greatest_length(longest):
    client = make_client()
    adder = adders.EpisodeAdder(client, longest)
    case = SequenceCase("", 0, 0, "", longest - 1, [])
    feed_sequences(adder, case)
    (item,) = drain(client)
    np.testing.assert_array_equal(item.observation, np.arange(1, longest + 1))
    np.testing.assert_array_equal(item.reward, [*range(10, 10 * longest, 10), 0])
    np.testing.assert_array_equal(item.mask, [1] * (longest - 1) + [0])
    np.testing.assert_array_equal(item.start_of_episode, [True] + [False] * (longest - 1))


@pytest.mark.parametrize("longest", [2, 10, 50])
def test_episode_that_is_too_long(longest):
    client = make_client()
    adder = adders.EpisodeAdder(client, longest)
    with pytest.raises(ValueError, match=f"max_sequence_length.*{longest}"):
        feed_sequences(adder, SequenceCase("", 0, 0, "", longest, []))
    assert drain(client) == []
    adder.reset()
    feed_sequences(adder, SequenceCase("", 0, 0, "", longest - 1, []))
    assert len(drain(client)) == 1


@pytest.mark.parametrize("fill", [0, -1])
def test_episode_with_padding(fill):
    client = make_client()
    adder = adders.EpisodeAdder(client, 6, padding_fn=lambda shape, dtype: np.full(shape, fill, dtype))
    feed_sequences(adder, SequenceCase("", 0, 0, "", 3, []))
    (item,) = drain(client)
    np.testing.assert_array_equal(item.observation, [1, 2, 3, 4, fill, fill])
    np.testing.assert_array_equal(item.reward, [10, 20, 30, 0, fill, fill])
    np.testing.assert_array_equal(item.extras["e"], [1.5, 2.5, 3.5, 0, fill, fill])
    np.testing.assert_array_equal(item.start_of_episode, [True] + [False] * 5)
    np.testing.assert_array_equal(item.mask, [1, 1, 1, 0, 0, 0])
