"""What Acme's adders write, case by case: sequences and episodes. Several envs are in tests/adders."""

import dataclasses

import dm_env
import numpy as np
import pytest
from adder_cases import check, check_signature
from adder_steps import drain, make_client
from dm_env import specs

from framework import adders
from framework.specs import EnvironmentSpec
from framework.types import Step


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


CONTINUED = ["123", "345", "567", "712", "234", "456", "671", "123", "345", "567"]
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
    SequenceCase("ContinueMultipleTerminated", 3, 2, "CONTINUE", 6, CONTINUED, episodes=3),
    SequenceCase("ContinueMultipleTruncated", 3, 2, "CONTINUE", 6, CONTINUED, episodes=3, truncated=True),
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
        observation, action = numbers.astype(np.float32), np.where(real, numbers, 0).astype(np.int32)
        reward = np.where(real, 10 * numbers, 0).astype(np.float32)
        extras = {"e": np.where(real, numbers + 0.5, 0).astype(np.float32)}
        starts, mask = numbers == 1, real.astype(np.float32)
        result.append(Step(observation, action, reward, discount.astype(np.float32), starts, extras, mask))
    return result


def feed_sequences(adder, case):
    for _ in range(case.episodes):
        for i in range(case.steps + 1):
            kind = FIRST if i == 0 else LAST if i == case.steps else MID
            end = i == case.steps and not case.truncated
            timestep = dm_env.TimeStep(kind, np.float32(10 * i), np.float32(not end), np.float32(i + 1))
            if i == 0:
                adder.add_first(timestep)
            else:
                adder.add(np.int32(i), timestep, {"e": np.float32(i + 0.5)})


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


# --- episodes ---


@pytest.mark.parametrize("longest", [2, 10])
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
