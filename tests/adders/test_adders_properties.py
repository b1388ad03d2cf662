"""The adders against slow, obviously right references: one env, one row, one item at a time."""

import collections

import dm_env
import numpy as np
import pytest
import tree
from adder_steps import FIRST, LAST, MID, TABLE, make_client, read
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import adders
from framework.types import Step, Transition


@st.composite
def scripts(draw, max_envs=4, max_time=24):
    """Step types ``[time, env]``; None for a call of ``reset()`` followed by ``add_first``."""
    envs = draw(st.integers(1, max_envs))
    time = draw(st.integers(1, max_time))
    kinds = [[FIRST] * envs]
    for _ in range(time):
        if draw(st.integers(0, 15)) == 0:
            kinds.append(None)
            kinds.append([FIRST] * envs)
            continue
        choices = st.sampled_from([MID, MID, MID, MID, LAST, LAST, FIRST])
        kinds.append([FIRST if kind == LAST else draw(choices) for kind in kinds[-1]])
    return kinds


Row = collections.namedtuple("Row", "observation action reward discount extras")


def play(adder, kinds, rng, flush, single=False):
    """Feeds the adder; returns per env the events ``(time, kind or None, row before, observation)``."""
    envs = len(kinds[0])
    events = [[] for _ in range(envs)]
    began = acted = False
    for t, types in enumerate(kinds):
        if types is None:
            adder.reset()
            began = False
            for env in events:
                env.append((t, None, None, None))
            continue
        observation = {"a": rng.integers(1, 200, (envs, 2)).astype(np.uint8), "b": rng.normal(size=envs)}
        reward = rng.normal(size=envs).astype(np.float32)
        discount = np.where(rng.random(envs) < 0.3, 0, rng.random(envs)).astype(np.float32)
        action = rng.integers(1, 9, envs)
        extras = {"e": rng.normal(size=(envs, 3)).astype(np.float32)}
        timestep = dm_env.TimeStep(np.array(types), reward, discount, observation)
        if single:
            observation, action, extras = tree.map_structure(lambda x: x[0], (observation, action, extras))
            timestep = dm_env.TimeStep(dm_env.StepType(types[0]), reward[0], discount[0], observation)
        if began:
            adder.add(action, timestep, extras)
        else:
            adder.add_first(timestep)
        if single:
            observation, action, extras = tree.map_structure(lambda x: x[None], (observation, action, extras))
        began = True
        acted = acted or any(types)
        if not acted:
            # Before the first action of all a new FIRST step replaces the one before it.
            events = [[] for _ in range(envs)]
        for b in range(envs):
            pick = lambda nest, b=b: tree.map_structure(lambda x: x[b].copy(), nest)  # noqa: E731
            row = Row(None, pick(action), reward[b], discount[b], pick(extras))
            events[b].append((t, types[b], row, pick(observation)))
        if rng.random() < flush:
            adder.flush_pending()
        for array in tree.flatten((observation, reward, discount, action, extras)):
            array[...] = (
                77  # adders copy: what happens to the caller's arrays later is none of their business
            )
    return events


def episodes(events):
    """Splits one env's events: ``(rows, times of completion, how it ended)``, with None for a reset."""
    rows, observation = None, None
    for t, kind, row, seen in events:
        if kind is None:
            yield rows, observation, t, "reset"
            rows = None
        elif kind == FIRST:
            if rows is not None:
                yield rows, observation, t, "cut"
            rows, observation = [], seen
        else:
            rows.append((t, row._replace(observation=observation)))
            observation = seen
            if kind == LAST:
                yield rows, observation, t, "last"
                rows = None
    if rows is not None:
        yield rows, observation, None, "open"


def reference_transitions(rows, last, ended_at, how, n, g):
    """Yields ``(time, item)`` of one episode."""
    observations = [row.observation for _, row in rows] + [last]

    def window(start, end):
        reward, discount = 0.0, 1.0
        for i in range(start, end):
            reward += discount * g ** (i - start) * rows[i][1].reward
            discount *= rows[i][1].discount
        first, factor = rows[start][1], g ** (end - start - 1)
        gained = np.float32(reward), np.float32(discount * factor)
        return Transition(observations[start], first.action, *gained, observations[end], first.extras)

    for end in range(1, len(rows) + 1):
        yield rows[end - 1][0], window(max(0, end - n), end)
    if how in ("last", "cut"):
        for start in range(max(0, len(rows) - n) + 1, len(rows)):
            yield ended_at, window(start, len(rows))


def as_step(rows):
    """Rows ``(start, real, Row)``, None for padding, as a ``Step``."""
    some = next(row for row in rows if row is not None)[2]
    zero = tree.map_structure(np.zeros_like, some)
    parts = []
    for row in rows:
        start, real, values = row if row is not None else (False, False, zero)
        parts.append(Step(*values[:4], np.bool_(start), extras=values.extras, mask=np.float32(real)))
    return tree.map_structure(lambda *leaves: np.stack(leaves), *parts)


def episode_rows(rows, last, how, ended_at):
    """``(time of completion, start, real, Row)`` of one episode, the closing row included if there is one."""
    out = [(t, i == 0, True, row) for i, (t, row) in enumerate(rows)]
    if how in ("last", "cut"):
        example = rows[0][1] if rows else None
        if example is not None:
            closing = tree.map_structure(np.zeros_like, example)._replace(observation=last)
            out.append((ended_at, not rows, False, closing))
        else:
            out.append((ended_at, True, False, last))
    return out


def reference_sequences(rows, length, period, behavior, finished):
    """Yields ``(time, rows of the item)`` for the rows of one stream."""
    written_to = 0
    for count in range(length, len(rows) + 1):
        if (count - length) % period == 0:
            yield rows[count - 1][0], rows[count - length : count]
            written_to = count
    if not finished or behavior == "CONTINUE" or written_to == len(rows):
        return
    time = rows[-1][0]
    if behavior == "WRITE":
        if len(rows) >= length:
            yield time, rows[-length:]
        return
    point = length
    while point < len(rows):
        point += period
    item = rows[point - length :]
    if behavior == "ZERO_PAD":
        item = item + [None] * (length - len(item))
    yield time, item


def check(expected, actual):
    assert len(actual) == len(expected)
    for want, got in zip(expected, actual, strict=True):
        tree.assert_same_structure(want, got)
        for path, value in tree.flatten_with_path(want):
            other = got
            for key in path:
                other = getattr(other, key) if isinstance(key, str) and hasattr(other, key) else other[key]
            assert np.shape(other) == np.shape(value), path
            np.testing.assert_allclose(other, value, rtol=1e-4, atol=1e-5, err_msg=str(path))


def in_order(found):
    """Items by the time of the call that completed them, then by env, then as they came."""
    return [item for *_, item in sorted(found, key=lambda entry: entry[:2])]


def compare(make, kinds, seed, flush, seen, single, reference):
    """What an adder writes, and what its priority function sees, equals the reference's items."""
    client = make_client()
    parts = []

    def priority(items):
        parts.extend(tree.map_structure(lambda x, i=i: x[i], items) for i in range(len(items.reward)))
        return np.ones(len(items.reward))

    adder = make(client, {TABLE: priority if seen else None})
    events = play(adder, kinds, np.random.default_rng(seed), flush, single)
    expected = in_order(reference(events))
    check(expected, read(client))
    if seen:
        check(expected, parts)
    adder.close()


# One env may come without a dimension of envs.
each_form = pytest.mark.parametrize("single", [False, True], ids=["batched", "single"])


def arguments(single, examples=30, **others):
    """A property's arguments: those of every adder, and its own."""
    script = scripts(max_envs=1 if single else 4)
    drawn = {"seed": st.integers(0, 1000), "flush": st.sampled_from([0, 0.3, 1]), "seen": st.booleans()}
    given_all = given(kinds=script, **drawn, **others)
    return lambda function: settings(max_examples=examples, deadline=None)(given_all(function))


@each_form
def test_transitions_equal_the_reference(single):
    @arguments(single, 40, n=st.integers(1, 5), g=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    def run(kinds, n, g, seed, flush, seen):
        def reference(events):
            return [
                (t, b, item)
                for b, env in enumerate(events)
                for rows, last, ended_at, how in episodes(env)
                if rows is not None
                for t, item in reference_transitions(rows, last, ended_at, how, n, g)
            ]

        def make(client, fns):
            return adders.NStepTransitionAdder(client, n, g, priority_fns=fns)

        compare(make, kinds, seed, flush, seen, single, reference)

    run()


@each_form
@pytest.mark.parametrize("behavior", ["ZERO_PAD", "TRUNCATE", "WRITE", "CONTINUE"])
def test_sequences_equal_the_reference(behavior, single):
    @arguments(single, length=st.integers(1, 6), data=st.data())
    def run(kinds, length, data, seed, flush, seen):
        period = data.draw(st.integers(1, length))

        def reference(events):
            zero = next((e[2] for env in events for e in env if e[2] is not None), None)
            found = []
            for b, env in enumerate(events):
                stream = []
                streams = []
                for rows, last, ended_at, how in episodes(env):
                    stream += [] if rows is None else episode_rows(rows, last, how, ended_at)
                    if how == "reset" or behavior != "CONTINUE":
                        streams.append((stream, how in ("last", "cut")))
                        stream = []
                streams.append((stream, False))
                for rows, finished in streams:
                    for t, item in reference_sequences(rows, length, period, behavior, finished):
                        if not any(row is not None and row[2] for row in item):
                            continue
                        fixed = []
                        for row in item:
                            if row is not None and not isinstance(row[3], Row):
                                values = tree.map_structure(np.zeros_like, zero)._replace(observation=row[3])
                                row = (*row[:3], values)
                            fixed.append(None if row is None else row[1:])
                        found.append((t, b, as_step(fixed)))
            return found

        def make(client, fns):
            return adders.SequenceAdder(client, length, period, behavior, priority_fns=fns)

        # A priority function sees padded items, also of those that are truncated.
        compare(make, kinds, seed, flush, seen and behavior != "TRUNCATE", single, reference)

    run()


@each_form
@pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
def test_episodes_equal_the_reference(padded, single):
    longest = 40

    @arguments(single)
    def run(kinds, seed, flush, seen):
        def reference(events):
            for b, env in enumerate(events):
                for rows, last, ended_at, how in episodes(env):
                    if rows and how == "last":
                        item = [row[1:] for row in episode_rows(rows, last, how, ended_at)]
                        item += [None] * (longest - len(item)) if padded else []
                        yield ended_at, b, as_step(item)

        def make(client, fns):
            return adders.EpisodeAdder(client, longest, np.zeros if padded else None, priority_fns=fns)

        compare(make, kinds, seed, flush, seen and padded, single, reference)

    run()
