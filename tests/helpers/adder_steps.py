"""Time steps for adders, one at a time or whole episodes of several envs, and what becomes of them."""

import dm_env
import numpy as np
import tree

from framework import adders, replay

TABLE = adders.REPLAY_TABLE
FIRST, MID, LAST = 0, 1, 2


def make_client(table=None, **options):
    return replay.EmbeddedClient([table or replay.Table.queue(TABLE, 10_000)], **options)


def step(kind, observation, reward=1.0, discount=None, envs=None):
    """A time step of one env, or of ``envs`` equal ones; ``kind`` may differ between envs."""
    discount = (0.0 if kind is LAST else 1.0) if discount is None else discount
    if envs is None:
        return dm_env.TimeStep(
            dm_env.StepType(kind), np.float32(reward), np.float32(discount), np.float32(observation)
        )
    full = [np.full(envs, value, np.float32) for value in (reward, discount, observation)]
    return dm_env.TimeStep(np.broadcast_to(np.asarray(kind), (envs,)), *full)


def play(adder, length, start=1):
    adder.add_first(step(FIRST, start))
    for i in range(length):
        adder.add(0, step(LAST if i == length - 1 else MID, start + i + 1))


def stacked_episodes(length, envs=3):
    """Yields ``(action, time step, extras)``: envs end at different times; observations stack two numbers."""
    rng = np.random.default_rng(0)
    kinds, observation = np.zeros(envs, np.int64), np.ones((envs, 2), np.float32)
    for t in range(length):
        reward, newest = rng.normal(size=(2, envs)).astype(np.float32)
        timestep = dm_env.TimeStep(kinds, reward, np.ones(envs, np.float32), observation)
        yield rng.integers(0, 9, envs), timestep, {"state": rng.normal(size=(envs, 3))}
        kinds = np.where(kinds == LAST, FIRST, np.where((t + np.arange(envs)) % 9 == 8, LAST, MID))
        observation = np.stack([observation[:, 1], newest], axis=1)


def feed(adder, steps):
    for t, (action, timestep, extras) in enumerate(steps):
        if t == 0:
            adder.add_first(timestep)
        else:
            adder.add(action, timestep, extras)


def read(client):
    """All items in the order in which they were written, without padding."""
    items = []
    while client.can_sample(TABLE, 1):
        sample = client.sample_batch(TABLE, 1, timeout=10, pad=True)
        lengths = getattr(sample, "lengths", None)
        if lengths is None:
            items.append(tree.map_structure(lambda x: x[0], sample.data))
        else:
            items.append(
                tree.map_structure(lambda x, n: x[0] if n is None else x[0, : n[0]], sample.data, lengths)
            )
    return items


def observations(client):
    """The observations of all items, in order; of transitions, pairs of them."""
    parts = [[item.observation, getattr(item, "next_observation", None)] for item in read(client)]
    return [np.array(first if last is None else [first, last]).tolist() for first, last in parts]
