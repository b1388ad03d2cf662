"""Time steps for adders, one at a time, and the observations of the items they become."""

import dm_env
import numpy as np

from framework import adders, replay

TABLE = adders.REPLAY_TABLE
FIRST, MID, LAST = 0, 1, 2


def make_client(table=None, **options):
    return replay.EmbeddedClient([table or replay.Table.queue(TABLE, 1000)], **options)


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


def observations(client):
    """The observations of all items, in order."""
    result = []
    while client.can_sample(TABLE, 1):
        sample = client.sample_batch(TABLE, 1, timeout=0, pad=True)
        observation = sample.data.observation[0]
        if hasattr(sample.data, "next_observation"):
            observation = np.array([observation, sample.data.next_observation[0]])
        elif hasattr(sample, "lengths"):
            observation = observation[: sample.lengths.observation[0]]
        result.append(observation.tolist())
    return result
