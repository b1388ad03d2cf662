"""An adder that continues from a saved state creates the items that the saved adder creates, bit for bit."""

import dm_env
import numpy as np
import pytest
import tree
from adder_items import TABLE, drain, make_client

from framework import adders, replay
from framework.checkpoints.state import pack, unpack

FIRST, MID, LAST = 0, 1, 2
STACK = 3

ADDERS = {
    "1-step": lambda client, **options: adders.NStepTransitionAdder(client, 1, 0.9, **options),
    "3-step": lambda client, **options: adders.NStepTransitionAdder(client, 3, 0.9, **options),
    "frames": lambda client, **options: adders.NStepTransitionAdder(
        client, 2, 0.9, frame_stack=STACK, **options
    ),
    **{
        behavior: lambda client, behavior=behavior, **options: adders.SequenceAdder(
            client, 4, 3, behavior, **options
        )
        for behavior in ("zero_pad", "truncate", "write", "continue")
    },
    "first row": lambda client, **options: adders.SequenceAdder(
        client, 5, 2, extras_of_first_row=("state",), **options
    ),
    "episodes": lambda client, **options: adders.EpisodeAdder(client, 60, **options),
    "padded episodes": lambda client, **options: adders.EpisodeAdder(client, 60, np.ones, **options),
    "unrolls": lambda client, **options: adders.UnrollAdder(
        client, 4, **{"priority_fns": {TABLE: None}, **options}
    ),
    "forking": lambda client, **options: adders.ForkingAdder(
        [
            adders.NStepTransitionAdder(client, 2, 0.9, **options),
            adders.IgnoreExtrasAdder(adders.NStepTransitionAdder(client, 1, 0.9, **options)),
        ]
    ),
}


def timeline(seed, envs, steps=60):
    """Yields `(action, timestep, extras)`; some episodes are cut short by a FIRST step."""
    rng = np.random.default_rng(seed)
    kinds, stack = np.zeros(envs, np.int64), np.zeros((envs, STACK, 2), np.uint8)
    for t in range(steps):
        if t:
            drawn = rng.choice([MID] * 8 + [LAST, LAST, FIRST], envs)
            kinds = np.where(kinds == LAST, FIRST, drawn)
        stack = np.where((kinds == FIRST)[:, None, None], np.uint8(0), stack)
        stack = np.concatenate([stack[:, 1:], rng.integers(0, 255, (envs, 1, 2), np.uint8)], 1)
        reward, discount = rng.normal(size=(2, envs)).astype(np.float32)
        extras = {"log_prob": rng.normal(size=envs), "state": rng.normal(size=(envs, 2)).astype(np.float32)}
        yield {"a": rng.integers(0, 9, envs)}, dm_env.TimeStep(kinds, reward, discount, stack), extras


def play(adder, steps, begins):
    for i, (action, timestep, extras) in enumerate(steps):
        if begins and i == 0:
            adder.add_first(timestep)
        else:
            adder.add(action, timestep, extras)


def assert_equal(actual, expected):
    tree.assert_same_structure(actual, expected)
    for one, other in zip(tree.flatten(actual), tree.flatten(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("at", [0, 2, 17, 40])
@pytest.mark.parametrize("name", ADDERS)
@pytest.mark.parametrize("with_priorities", [False, True], ids=["rows in replay", "rows kept"])
def test_the_same_items_after_a_restart(name, at, envs, with_priorities):
    created = []

    def make():
        def priorities(item):
            created.append(len(tree.flatten(item.reward)[0]))
            return np.ones(created[-1])

        client = make_client()
        options = {"priority_fns": {TABLE: priorities}} if with_priorities else {}
        return client, ADDERS[name](client, **options)

    steps = list(timeline(at, envs))
    client, adder = make()
    play(adder, steps[:at], begins=True)
    if at == 40:
        adder.flush()
    saved, before = pack(adder.state()), sum(created)
    play(adder, steps[at:], begins=at == 0)
    expected = drain(client)

    another, restored = make()
    restored.set_state(unpack(saved))
    play(restored, steps[at:], begins=at == 0)
    actual = drain(another)
    assert actual
    assert_equal(actual, expected[len(expected) - len(actual) :])
    if with_priorities:
        assert len(actual) == len(expected) - before
    if name != "forking":
        assert restored.num_dropped_episodes == adder.num_dropped_episodes


def test_a_single_env_with_python_scalars():
    def steps():
        for t in range(12):
            yield 1, dm_env.TimeStep(dm_env.StepType.MID if t else dm_env.StepType.FIRST, 0.5 * t, 1.0, t), ()

    client, another = make_client(), make_client()
    adder, restored = (adders.NStepTransitionAdder(each, 2, 0.9) for each in (client, another))
    first, second = list(steps())[:6], list(steps())[6:]
    play(adder, first, begins=True)
    restored.set_state(adder.state())
    play(adder, second, begins=False)
    play(restored, second, begins=False)
    actual = drain(another)
    assert_equal(actual, drain(client)[-len(actual) :])


def test_an_adder_with_time_steps_or_waiting_items_is_refused():
    client = replay.EmbeddedClient([replay.Table.queue(TABLE, 1)], concurrent=False)
    adder = adders.NStepTransitionAdder(client, 1, 0.9)
    play(adder, list(timeline(0, 2, 4)), begins=True)
    with pytest.raises(ValueError, match="set_state"):
        adder.set_state(adders.NStepTransitionAdder(client, 1, 0.9).state() | {"fields": [()]})
    adder.ready()
    with pytest.raises(replay.DeadlineExceededError):
        adder.state()
