"""The policy actor: recurrent state per env, extras in their rows, and what it hands to the adder."""

import dm_env
import numpy as np
import pytest
import torch

from framework import core
from framework.actors import PolicyActor
from framework.actors.acme import AcmeActor

FIRST, MID, LAST = (int(kind) for kind in dm_env.StepType)


class CountingPolicy(core.Policy):
    """Counts each env's steps since its episode began; acts and annotates by that count."""

    def __init__(self, make=np.zeros):
        self._make = make
        self.seeded_with = None

    def initial_state(self, batch_size):
        return {"count": self._make(batch_size)}

    def step(self, observation, state):
        count = state["count"]
        return np.asarray(count).astype(np.int64), {"count": np.asarray(count).copy()}, {"count": count + 1}

    def seed(self, seed):
        self.seeded_with = seed


class RecordingAdder:
    def __init__(self, room=True):
        self.calls = []
        self.room = room

    def ready(self):
        return self.room

    def add_first(self, timestep):
        self.calls.append(("first", timestep))

    def add(self, action, next_timestep, extras=()):
        self.calls.append(("add", action, next_timestep, extras))


class RecordingClient:
    def __init__(self):
        self.waits = []

    def update(self, wait=False):
        self.waits.append(wait)


def timestep(*kinds):
    envs = len(kinds)
    zeros = np.zeros(envs, np.float32)
    return dm_env.TimeStep(np.array(kinds), zeros, zeros + 1, np.zeros((envs, 2), np.float32))


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_each_envs_state_starts_anew_with_its_episode(make):
    actor = PolicyActor(CountingPolicy(make), num_envs=3)
    first = timestep(FIRST, FIRST, FIRST)
    actor.observe_first(first)
    kinds = (MID, MID, MID), (MID, LAST, MID), (MID, FIRST, LAST), (MID, MID, FIRST)
    rows = [timestep(*row) for row in kinds]
    actions = []
    for row in rows:
        action = actor.select_action(row.observation)
        actions.append(action.tolist())
        before = actor.state["count"].tolist(), actor.state["count"]
        actor.observe(action, row)
        assert before[0] == before[1].tolist(), "Extras may refer to it."
    # An env that was LAST still acts once, in vain, before its FIRST.
    assert actions == [[0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 0, 3]]
    assert actor.select_action(rows[-1].observation).tolist() == [4, 1, 0]
    actor.observe_first(first)
    assert actor.select_action(first.observation).tolist() == [0, 0, 0]


def test_the_adder_gets_every_step_with_the_extras_of_its_action():
    adder = RecordingAdder()
    actor = PolicyActor(CountingPolicy(), adder, num_envs=2)
    first, second = timestep(FIRST, FIRST), timestep(MID, FIRST)
    actor.observe_first(first)
    for row in (timestep(MID, LAST), second):
        action = actor.select_action(row.observation)
        actor.observe(action, row)
    assert [call[0] for call in adder.calls] == ["first", "add", "add"]
    assert adder.calls[0][1].step_type.tolist() == first.step_type.tolist()
    _, action, row, extras = adder.calls[2]
    assert row.step_type.tolist() == second.step_type.tolist()
    # State of the time of the observation, not after it, and not reset by what came next.
    assert action.tolist() == extras["count"].tolist() == [1, 1]


def test_update_goes_to_the_client_and_ready_to_the_adder():
    client = RecordingClient()
    actor = PolicyActor(CountingPolicy(), RecordingAdder(room=False), client)
    actor.update()
    actor.update(wait=True)
    assert client.waits == [False, True]
    assert not actor.ready()
    assert PolicyActor(CountingPolicy()).ready()
    PolicyActor(CountingPolicy()).update()


def test_calls_out_of_order_are_errors():
    actor = PolicyActor(CountingPolicy(), num_envs=2)
    with pytest.raises(RuntimeError, match="before observe_first"):
        actor.select_action(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="num_envs: got 0"):
        PolicyActor(CountingPolicy(), num_envs=0)


def test_the_policys_random_choices_are_seeded():
    policy = CountingPolicy()
    PolicyActor(policy, seed=7)
    assert policy.seeded_with == 7


def test_an_acme_loop_may_have_nests_of_rewards():
    adder = RecordingAdder()
    actor = AcmeActor(PolicyActor(CountingPolicy(), adder))
    actor.observe_first(dm_env.restart(np.zeros(2)))
    rewards = {"one": 1.0, "two": np.ones(2)}
    actor.observe(actor.select_action(np.zeros(2)), dm_env.TimeStep(MID, rewards, 0.5, np.zeros(2)))
    timestep = adder.calls[-1][2]
    assert timestep.reward["one"].tolist() == [1] and timestep.reward["two"].tolist() == [[1, 1]]
    assert timestep.discount.tolist() == [0.5]


@pytest.mark.parametrize("total", [None, 9])
def test_an_actor_has_the_states_of_its_own_envs(total):
    class Numbered(CountingPolicy):
        def initial_state(self, batch_size):
            return {"count": np.arange(batch_size)}

    actor = PolicyActor(Numbered(), num_envs=2, offset=3, total=total)
    actor.observe_first(dm_env.restart(np.zeros((2, 1))))
    assert actor.select_action(np.zeros((2, 1))).tolist() == [3, 4]
