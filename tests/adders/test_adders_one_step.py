"""Items of n-step transitions that hold their first step too."""

import dm_env
import numpy as np
import pytest
from adder_steps import FIRST, LAST, MID, TABLE, make_client, step

from framework import adders, replay, specs
from framework.environments.testing import make_spec
from framework.types import OneStep

DISCOUNT = 0.9


def play(client, n, frames=None, extras=False, priorities=None):
    """Two envs; env b's observation at time t is 10 b + t, the reward of its step 100 b + t + 1."""
    adder = adders.NStepTransitionAdder(
        client, n, DISCOUNT, priority_fns={TABLE: priorities}, frame_stack=frames, one_step=True
    )

    def timestep(t, kind):
        observation = np.float32(10 * np.arange(2) + t)
        if frames:  # Before the episode, its first frame.
            observation = np.stack([10 * np.arange(2) + max(t - i, 0) for i in (1, 0)], 1).astype(np.float32)
        reward = np.float32(100 * np.arange(2) + t)
        return dm_env.TimeStep(np.full(2, kind), reward, np.full(2, np.float32(kind != 2)), observation)

    adder.add_first(timestep(0, 0))
    for t in range(1, 5):
        kind = 2 if t == 4 else 1
        adder.add(np.full(2, t - 1), timestep(t, kind), {"t": np.full(2, t - 1)} if extras else ())
    adder.flush()
    return client.sample_batch(TABLE, client.server_info()[TABLE].current_size).data


@pytest.mark.parametrize("n", [1, 3, 10])
@pytest.mark.parametrize("frames", [None, 2])
def test_the_first_step_of_an_item(n, frames):
    data = play(make_client(), n, frames)
    assert isinstance(data.extras, OneStep)
    first, following = (leaf[:, -1] if frames else leaf for leaf in (data.observation, data.next_observation))
    one = data.extras.next_observation[:, -1] if frames else data.extras.next_observation
    env, t = np.divmod(first, 10)
    np.testing.assert_array_equal(one, first + 1)
    np.testing.assert_array_equal(data.extras.reward, 100 * env + t + 1)
    np.testing.assert_array_equal(data.extras.discount, t != 3)  # The fourth step ends the episode.
    length = following - first
    assert set(length) == set(range(1, min(n, 4) + 1))
    # The other fields are those of the n-step transition.
    sums = [
        sum(DISCOUNT**i * (100 * e + s + 1 + i) for i in range(int(k)))
        for e, s, k in zip(env, t, length, strict=True)
    ]
    np.testing.assert_allclose(data.reward, sums, rtol=1e-6)
    assert data.extras.extras == ()


def test_priority_functions_get_it_and_the_policys_extras_stay():
    seen = []

    def priorities(items):
        seen.append(items)
        return np.ones(len(items.reward))

    data = play(make_client(), 2, extras=True, priorities=priorities)
    np.testing.assert_array_equal(data.extras.extras["t"], data.action)
    (items,) = seen
    np.testing.assert_array_equal(items.extras.next_observation, items.observation + 1)
    np.testing.assert_array_equal(items.extras.extras["t"], items.action)


def test_the_signature_is_that_of_the_items():
    spec = make_spec(observations=specs.Array((), np.float32), actions=specs.Array((), np.int64))
    signature = adders.NStepTransitionAdder.signature(spec, one_step=True)
    client = make_client(replay.Table.queue(TABLE, 100, signature=signature))
    assert isinstance(play(client, 2).extras, OneStep)


def test_rewards_are_clipped_before_they_are_summed():
    client = make_client()
    adder = adders.NStepTransitionAdder(client, 3, 1.0, one_step=True, reward_clip=1.0)
    adder.add_first(step(FIRST, 0))
    for kind, reward in ((MID, 5.0), (MID, -1.0), (LAST, -7.0)):
        adder.add(0, step(kind, 0, reward))
    # The windows 0->1, 0->2, 0->3, 1->3 and 2->3, in the order in which they end.
    data = client.sample_batch(TABLE, 5).data
    assert data.reward.tolist() == [1.0, 0.0, -1.0, -2.0, -1.0]
    assert data.extras.reward.tolist() == [1.0, 1.0, 1.0, -1.0, -1.0]
