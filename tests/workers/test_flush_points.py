"""Who waits writes first: what tables have when an actor pauses, without a read that asks for it."""

import time
import types

import numpy as np
import pytest

from framework import adders, core, environments, replay
from framework.actors import EnvironmentLoop, PolicyActor
from framework.environments.testing import EchoEnvironment
from framework.workers.actor_worker import ActorWorker
from framework.workers.gates import Gate
from framework.workers.lockstep import Lockstep, Unrolls


class Policy(core.Policy):
    """Takes its time."""

    def __init__(self, seconds):
        self.seconds = seconds

    def initial_state(self, batch_size):
        return ()

    def step(self, observation, state):
        time.sleep(self.seconds)
        return np.ones(len(observation), np.int64), (), state


@pytest.fixture
def acting():
    """`acting(max_delay, seconds)`: a table, a loop that fills it, and the sizes that `step` finds."""
    made = []

    def makes(max_delay, seconds=0.0):
        table = replay.Table.queue("replay", 100)  # `len(table)` is no read: it shows what others would see.
        client = replay.EmbeddedClient([table])
        adder = adders.NStepTransitionAdder(client, 1, 0.9, max_delay=max_delay)
        environment = environments.make(EchoEnvironment, options={"episode_length": 50}, stepping="inline")
        sizes, step = [], environment.step
        environment.step = lambda action: (sizes.append(len(table)), step(action))[1]
        actor = PolicyActor(Policy(seconds), adders.ForkingAdder([adder]))
        made.extend([adder, environment])
        return table, EnvironmentLoop(environment, actor), sizes

    yield makes
    for each in made:
        each.close()


def test_what_is_late_is_written_before_a_step_and_the_rest_at_the_end_of_the_run(acting):
    table, loop, sizes = acting(max_delay=0.04, seconds=0.05)
    loop.run(num_steps=4)
    assert sizes == [0, 1, 2, 3]
    assert len(table) == 4


@pytest.mark.parametrize("limit", ["num_steps", "num_episodes"])
def test_nothing_is_written_before_it_is_late_but_all_at_the_end_of_the_run(acting, limit):
    table, loop, sizes = acting(max_delay=1e9)
    made = loop.run(**{limit: {"num_steps": 9, "num_episodes": 1}[limit]})
    assert not any(sizes)
    assert len(table) == made >= 9


def steps_of(acting):
    table, loop, _ = acting(max_delay=1e9)
    for _ in range(3):
        loop.step()
    assert len(table) == 0
    return table, types.SimpleNamespace(version=0, adders=[loop._actor.adder])


def test_an_actor_writes_before_it_waits_for_a_version(acting):
    table, collector = steps_of(acting)
    seen = []
    learner = types.SimpleNamespace(wait_for_version=lambda *_: seen.append(len(table)))
    unrolls = Unrolls(1, 0)
    unrolls.first = 1
    assert not Lockstep("actor-0", learner, types.SimpleNamespace(is_ending=bool), collector, unrolls).open()
    assert seen == [3]


def test_an_actor_writes_at_a_gate_that_is_shut(acting):
    table, collector = steps_of(acting)

    class Shut(Gate):
        def open(self):
            return False

    worker = types.SimpleNamespace(_started=True, _gates=[Shut()], _budget=None, _collector=collector)
    ActorWorker.step(worker)
    assert len(table) == 3
