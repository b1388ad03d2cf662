"""What adders refuse, and what they survive."""

import contextlib

import dm_env
import numpy as np
import pytest
from adder_steps import FIRST, LAST, MID, TABLE, make_client, observations, play, read, step
from dm_env import specs
from served_table import table

from framework import adders, replay
from framework.adders import block
from framework.replay import selectors
from framework.replay.errors import ServerLost
from framework.specs import EnvironmentSpec

MAKERS = {
    "transitions": lambda client, **options: adders.NStepTransitionAdder(client, 2, 0.9, **options),
    "sequences": lambda client, **options: adders.SequenceAdder(client, 2, 1, **options),
    "episodes": lambda client, **options: adders.EpisodeAdder(client, 10, **options),
}
each_adder = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def test_a_refused_step_of_an_episode_does_not_count(monkeypatch):
    def refuse(*args, **options):
        raise replay.WouldBlockError("no room")

    monkeypatch.setattr(block, "_MAX_BLOCK_STEPS", 1)
    client = make_client(concurrent=False)
    adder = adders.EpisodeAdder(client, 3)
    adder.add_first(step(FIRST, 1))
    with monkeypatch.context() as patch:
        patch.setattr(adder._out.writer, "flush", refuse)
        for _ in range(3):
            with pytest.raises(replay.WouldBlockError):
                adder.add(0, step(MID, 2))
    adder.add(0, step(MID, 2))
    adder.add(0, step(LAST, 3))
    assert observations(client) == [[1, 2, 3]]


# --- the order of calls ---


@each_adder
def test_add_before_add_first_is_an_error(make):
    with pytest.raises(ValueError, match="add_first"):
        make(make_client()).add(0, step(MID, 1))


@each_adder
@pytest.mark.parametrize("kind", [MID, LAST])
def test_a_first_call_that_is_no_first_step_is_an_error(make, kind):
    adder = make(make_client())
    with pytest.raises(ValueError, match="FIRST"):
        adder.add_first(step(kind, 1))
    play(adder, 2)


@each_adder
def test_add_after_the_end_of_an_episode_is_an_error(make):
    client = make_client()
    adder = make(client)
    play(adder, 2)
    with pytest.raises(ValueError, match="after the end of the episode"):
        adder.add(0, step(MID, 9))
    before = observations(client)
    assert before and 9.0 not in np.ravel(before[-1])
    play(adder, 2)
    assert observations(client) == before


@each_adder
def test_one_env_after_its_end_is_an_error_that_names_it(make):
    adder = make(make_client())
    adder.add_first(step(FIRST, 1, envs=3))
    adder.add(np.zeros(3), step([MID, LAST, MID], 2, envs=3))
    with pytest.raises(ValueError, match=r"envs \[1\]"):
        adder.add(np.zeros(3), step([MID, MID, MID], 3, envs=3))
    adder.add(np.zeros(3), step([MID, FIRST, LAST], 3, envs=3))


@each_adder
def test_a_closed_adder_refuses_calls(make):
    adder = make(make_client())
    play(adder, 1)
    assert adder.close() == 0
    assert adder.close() == 0
    for call in (lambda: adder.add_first(step(FIRST, 1)), lambda: adder.add(0, step(MID, 1)), adder.reset):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert not adder.ready()


@each_adder
@pytest.mark.parametrize("method", ["append", "create_items"])
def test_an_adder_whose_server_is_lost_can_be_closed(make, method, monkeypatch):
    """With rows that it has not written yet."""

    def lost(*args, **options):
        raise ServerLost("the replay server of this writer was lost")

    adder = make(make_client())
    adder.add_first(step(FIRST, 1))
    adder.add(0, step(MID, 2))
    adder.add(0, step(LAST, 3))
    monkeypatch.setattr(adder._out.writer, method, lost)
    assert adder.close(timeout=0) == 0
    assert adder.close() == 0


ABORTED = {
    # name: (after an episode 1, 2, 3 that does not end: reset() or FIRST, what is in replay of it)
    "transitions-reset": ("transitions", True, [[1, 2], [1, 3]]),
    "transitions-first": ("transitions", False, [[1, 2], [1, 3], [2, 3]]),
    "sequences-reset": ("sequences", True, [[1, 2]]),
    "sequences-first": ("sequences", False, [[1, 2], [2, 3]]),
    "episodes-reset": ("episodes", True, []),
    "episodes-first": ("episodes", False, []),
}


def begin_episode(adder):
    adder.add_first(step(FIRST, 1))
    adder.add(0, step(MID, 2))
    adder.add(0, step(MID, 3))


def another_episode(kind):
    """Its items."""
    client = make_client()
    play(MAKERS[kind](client), 2, start=11)
    return observations(client)


@pytest.mark.parametrize("kind, resets, expected", ABORTED.values(), ids=ABORTED)
def test_an_episode_that_is_given_up(kind, resets, expected):
    client = make_client()
    adder = MAKERS[kind](client)
    begin_episode(adder)
    if resets:
        adder.reset()
    play(adder, 2, start=11)
    assert observations(client) == expected + another_episode(kind)
    assert adder.num_dropped_episodes == (1 if resets or kind == "episodes" else 0)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("transitions", [[1, 2], [1, 3], [2, 3]]),
        ("sequences", [[1, 2], [2, 3]]),
        ("whole sequences", [[1, 2], [2, 3]]),
        ("episodes", [[1, 2, 3]]),
    ],
)
def test_an_episode_that_is_ended_from_outside(kind, expected, reads):
    client = make_client()
    adder = {**MAKERS, "whole sequences": whole_sequences}[kind](client)
    adder.end_episodes()
    begin_episode(adder)
    found = observations(client) if reads else []
    for _ in range(2):
        adder.end_episodes()
    assert found + observations(client) == expected
    play(adder, 2, start=11)
    assert observations(client) == another_episode(kind.split()[-1])
    assert adder.num_dropped_episodes == 0


def whole_sequences(client):
    return adders.SequenceAdder(client, 2, 1, "write")


@each_adder
def test_an_episode_without_a_step_is_not_dropped(make):
    adder = make(make_client())
    adder.reset()  # before anything
    adder.add_first(step(FIRST, 1, envs=2))
    adder.reset()
    adder.add_first(step(FIRST, 1, envs=2))
    adder.add(np.zeros(2, int), step([LAST, MID], 2, envs=2))
    adder.add(np.zeros(2, int), step([FIRST, MID], 3, envs=2))
    adder.reset()
    assert adder.num_dropped_episodes == 1


# --- values ---


BAD = {
    "shape": (np.zeros(4, np.float32), "observation/x.*shape"),
    "dtype": (np.zeros(3, np.float64), "observation/x.*float64.*float32"),
    "text": ("north", "observation/x"),
}


@pytest.mark.parametrize("value, message", BAD.values(), ids=BAD)
def test_a_leaf_that_changes_is_an_error_that_names_it(value, message):
    client = make_client()
    adder = MAKERS["transitions"](client)
    good = {"x": np.zeros(3, np.float32), "y": np.float32(0)}
    adder.add_first(dm_env.restart(good))
    adder.add(0, dm_env.transition(1.0, good))
    with pytest.raises(ValueError, match=message):
        adder.add(0, dm_env.transition(1.0, {**good, "x": value}))
    with pytest.raises(ValueError, match="structure"):
        adder.add(0, dm_env.transition(1.0, {"x": good["x"]}))
    with pytest.raises(ValueError, match="extras"):
        adder.add(0, dm_env.transition(1.0, good), extras=np.float32(1))
    # None of these calls counts.
    adder.add(0, dm_env.termination(1.0, good))
    assert client.server_info()[TABLE].current_size == 3


@pytest.mark.parametrize("clip", [None, 3.0])
@pytest.mark.parametrize("first", [0, 0.0, np.int64(0), np.float32(0)])
def test_numbers_of_another_kind_are_taken_as_rewards(first, clip):
    client = make_client()
    adder = adders.NStepTransitionAdder(client, 1, 0.9, reward_clip=clip)
    adder.add_first(step(FIRST, 1))
    for reward in (first, 0.5, np.float64(2), np.int64(3), True):
        adder.add(0, dm_env.transition(reward, np.float32(1), discount=1))
    rewards = client.sample_batch(TABLE, 5).data.reward
    assert rewards.dtype == np.float32
    np.testing.assert_array_equal(rewards, [0, 0.5, 2, 3, 1])


def test_rewards_of_half_precision_are_summed_in_single_precision():
    client = make_client()
    adder = adders.NStepTransitionAdder(client, 2, 1.0)
    adder.add_first(step(FIRST, 1))
    for reward in (2048, 1):
        adder.add(0, dm_env.transition(np.float16(reward), np.float32(1), discount=np.float16(1)))
    rewards = client.sample_batch(TABLE, 2).data.reward
    assert rewards.dtype == np.float32
    assert rewards.tolist() == [2048, 2049]  # Numbers of 16 bits have no 2049.


def test_a_first_step_whose_rewards_and_discounts_do_not_fit_together_is_not_added():
    client = make_client()
    adder = adders.NStepTransitionAdder(client, 1, 0.9)
    adder.add_first(step(FIRST, 0))
    good = step(MID, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="reward and discount"):
            adder.add(0, good._replace(reward=np.zeros(2, np.float32), discount=np.ones(3, np.float32)))
    adder.add(0, good)
    assert len(read(client)) == 1


def test_envs_must_stay_the_same_number():
    adder = MAKERS["transitions"](make_client())
    adder.add_first(step(FIRST, 1, envs=3))
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        adder.add(np.zeros(2), step(MID, 1, envs=2))
    with pytest.raises(ValueError, match=r"action.*3 envs"):
        adder.add(np.zeros(4), step(MID, 1, envs=3))


ARGUMENTS = {
    "n of zero": lambda c: adders.NStepTransitionAdder(c, 0, 0.9),
    "fraction of n": lambda c: adders.NStepTransitionAdder(c, 1.5, 0.9),
    "discount above one": lambda c: adders.NStepTransitionAdder(c, 1, 1.1),
    "clip below zero": lambda c: adders.NStepTransitionAdder(c, 1, 0.9, reward_clip=-1.0),
    "period above length": lambda c: adders.SequenceAdder(c, 3, 4),
    "period of zero": lambda c: adders.SequenceAdder(c, 3, 0),
    "length of zero": lambda c: adders.SequenceAdder(c, 0, 1),
    "unknown behavior": lambda c: adders.SequenceAdder(c, 3, 1, "PAD"),
    "episodes of one row": lambda c: adders.EpisodeAdder(c, 1),
    "no table": lambda c: adders.EpisodeAdder(c, 5, priority_fns={}),
    "no adder": lambda c: adders.ForkingAdder([]),
}


@pytest.mark.parametrize("make", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_make_no_sense(make):
    with pytest.raises(ValueError, match="expected"):
        make(make_client())


# --- the mask, and the rows that a loss bootstraps from ---


# --- tables, priorities ---


def test_priorities_come_from_the_tables_own_functions():
    client = replay.EmbeddedClient(
        [table(name, sampler=selectors.MaxHeap()) for name in ("by_reward", "plain")]
    )
    adder = adders.NStepTransitionAdder(
        client, 1, 0.9, priority_fns={"by_reward": lambda items: items.reward * 2, "plain": None}
    )
    adder.add_first(step(FIRST, 1))
    for reward in (1, 5, 3):
        adder.add(0, step(MID, reward, reward=reward))
    best = client.sample_batch("by_reward", 1)
    assert best.data.reward[0] == 5 and best.info.priority[0] == 10
    assert client.sample_batch("plain", 1).info.priority[0] == 1
    assert client.server_info()["plain"].current_size == 3


def test_a_priority_function_may_return_one_number_for_all_but_no_array_of_another_shape():
    adder = adders.NStepTransitionAdder(make_client(), 1, 0.9, priority_fns={TABLE: lambda items: 2.5})
    play(adder, 3)
    adder.flush()
    largest = {TABLE: lambda items: np.max(items.reward, keepdims=True)}
    adder = adders.NStepTransitionAdder(make_client(), 1, 0.9, priority_fns=largest, max_delay=1e9)
    play(adder, 3)
    with pytest.raises(ValueError, match=r"priority_fns\['replay'\].*\(3,\)"):
        adder.flush()


@each_adder
def test_a_priority_function_may_read_replay(make):
    """The read asks for staged steps, those that the function is called for among them: they are not written
    twice."""
    client, sizes = make_client(), []

    def priority(items):
        sizes.append(client.server_info()[TABLE].current_size)
        client.can_sample(TABLE)
        return 1.0

    adder = make(client, priority_fns={TABLE: priority})
    play(adder, 5)
    adder.flush()
    with_reads = observations(client)
    assert sizes

    client = make_client()
    adder = make(client)
    play(adder, 5)
    adder.flush()
    np.testing.assert_equal(with_reads, observations(client))


def test_forking_and_ignoring_extras():
    tables = [replay.Table.queue(name, 100) for name in ("a", "b")]
    client = replay.EmbeddedClient(tables)
    inner = [adders.NStepTransitionAdder(client, 1, 0.9, priority_fns={name: None}) for name in ("a", "b")]
    adder = adders.ForkingAdder([inner[0], adders.IgnoreExtrasAdder(inner[1])])
    adder.add_first(step(FIRST, 1))
    adder.add(0, step(LAST, 2), extras={"logits": np.zeros(2, np.float32)})
    assert adder.ready()
    adder.reset()
    adder.flush(timeout=60)
    assert client.sample_batch("a", 1).data.extras["logits"].shape == (1, 2)
    assert client.sample_batch("b", 1).data.extras == ()
    assert adder.close(timeout=60) == 0


def test_an_error_at_the_close_of_one_fork_does_not_keep_the_others_open():
    def fail(items):
        raise ArithmeticError("no priorities")

    fns = {"a": fail, "b": None, "c": fail}
    client = replay.EmbeddedClient([replay.Table.queue(name, 100) for name in fns])
    inner = [adders.EpisodeAdder(client, 5, priority_fns={name: fn}) for name, fn in fns.items()]
    adder = adders.ForkingAdder(inner)
    adder.add_first(step(FIRST, 1))
    adder.add(0, step(LAST, 2))
    with pytest.raises(ArithmeticError):
        adder.close()
    assert client.server_info()["b"].current_size == 1
    for fork in inner:
        with pytest.raises(ValueError, match="closed"):
            fork.add_first(step(FIRST, 1))


@each_adder
def test_a_table_with_the_adders_signature_takes_its_items(make):
    one = specs.Array((), np.float32)
    spec = EnvironmentSpec(one, specs.DiscreteArray(5, np.int32), one, one)
    adder_class = type(make(make_client()))
    signature = adder_class.signature(spec, {"state": specs.Array((2,), np.float32)})
    client = make_client(replay.Table.queue(TABLE, 10, signature=signature))
    adder = make(client)
    adder.add_first(step(FIRST, 1))
    adder.add(np.int32(1), step(LAST, 2), {"state": np.zeros(2, np.float32)})
    adder.flush()
    assert client.server_info()[TABLE].current_size >= 1
    other = make(make_client(replay.Table.queue(TABLE, 10, signature=signature)), max_delay=1e9)
    other.add_first(step(FIRST, 1))
    other.add(np.int64(1), step(LAST, 2), {"state": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match="action"):
        other.flush()


# --- rows are given back, tables that are full, threads ---


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_that_begins_an_episode_needs_no_reward(clip):
    client = make_client()
    adder = adders.NStepTransitionAdder(client, 1, 0.9, reward_clip=clip)
    observation = np.zeros(2, np.float32)
    adder.add_first(dm_env.restart(observation))
    adder.add(0, dm_env.termination(2.0, observation))
    adder.add(0, dm_env.restart(observation))
    adder.add(0, dm_env.transition(0.5, observation))
    rewards = client.sample_batch(TABLE, 2).data.reward
    assert rewards.tolist() == [2.0 if clip is None else 1.0, 0.5]


@pytest.mark.parametrize(
    "make",
    [
        lambda client, fns: adders.NStepTransitionAdder(client, 1, 0.9, priority_fns=fns),
        lambda client, fns: adders.SequenceAdder(client, 2, 1, extras_of_first_row=("h",), priority_fns=fns),
    ],
    ids=["nstep", "sequence"],
)
@pytest.mark.parametrize("fails", [False, True])
def test_no_rows_stay_behind(make, fails):
    def priorities(batch):
        if fails:
            raise ValueError("broken")
        return 1.0

    client = make_client()
    adder = make(client, {TABLE: priorities})
    observation, rows = np.zeros(2, np.float32), []
    for _ in range(20):
        adder.add_first(dm_env.restart(observation))
        with contextlib.suppress(ValueError) if fails else contextlib.nullcontext():
            adder.add(0, dm_env.transition(1.0, observation), {"h": np.float32(0)})
            adder.flush()
        if not fails:
            read(client)
        rows.append(max(stream.num_rows for stream in client.store.streams.values()))
    assert rows[-1] <= rows[4] + 1, rows
