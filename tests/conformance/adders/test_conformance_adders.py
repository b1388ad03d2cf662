"""What Acme's adders write, case by case: n-step transitions; one env, and several."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from adder_cases import array, check, check_envs, check_signature, episode, feed, spec_like
from adder_steps import make_client, read

from framework import adders
from framework.specs import EnvironmentSpec
from framework.types import Transition


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
    TransitionCase("EpisodeOneLongerThanNeeded", 3, 1.0, [1, 1], [(1, 1, 1, 2), (1, 2, 0, 3), (2, 1, 0, 3)]),
]


def transitions(case):
    result = []
    for observation, reward, discount, following, *extras in case.expected:
        before, after = case.observe(observation), case.observe(following)
        extra = array(extras[0]) if extras else ()
        result.append(Transition(before, np.int32(0), array(reward), array(discount), after, extra))
    return result


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("case", TRANSITIONS, ids=lambda case: case.name)
def test_transitions(case, repeat):
    client = make_client()
    adder = adders.NStepTransitionAdder(client, case.n, case.g)
    steps = episode(case.rewards, case.discounts, observe=case.observe)
    feed(adder, [steps] * repeat, case.extras)
    items = read(client)
    check(items, transitions(case) * repeat)
    spec = EnvironmentSpec(
        spec_like(steps[0][3]), spec_like(np.int32(0)), spec_like(steps[1][1]), spec_like(steps[1][2])
    )
    extras_spec = () if case.extras is None else spec_like(case.extras(0))
    check_signature(items, adders.NStepTransitionAdder.signature(spec, extras_spec))


@pytest.mark.parametrize("case", TRANSITIONS, ids=lambda case: case.name)
def test_transitions_of_several_envs(case):
    client = make_client()
    adder = adders.NStepTransitionAdder(client, case.n, case.g)
    feed(adder, [episode(case.rewards, case.discounts, observe=case.observe)] * 2, case.extras, envs=3)
    check_envs(read(client), transitions(case) * 2, 3)
