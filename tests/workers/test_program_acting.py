"""Halves that alternate: who asks when, what is dropped, what is kept of both."""

import functools
import itertools
import types

import dm_env
import numpy as np
import pytest
import torch
from helpers.node_clients import make_client

from framework import core, environments, specs
from framework.actors import PolicyActor
from framework.actors.inference_client import ServerPort
from framework.environments.testing import EchoEnvironment
from framework.loggers import InMemoryLogger
from framework.programs import RunConfig
from framework.replay.errors import ServerLost
from framework.runs.services import Counter, Monitor
from framework.workers import collector
from framework.workers.actor_worker import ActorWorker
from framework.workers.gates import Budget
from framework.workers.worker import Setup


class LoggedPort(ServerPort):
    """The action is 1 in every env; writes down who asked when."""

    def __init__(self, server, name, *envs):
        self._name, self._log = "ab"[int(name[-1])], server.log
        self._future = None
        self.updates, self.envs = 0, envs
        server.ports.append(self)

    def request(self, observation, first):
        if self._future is not None:
            return
        self._future = np.ones(len(observation), np.int64)
        self._log.append(f"ask {self._name}")

    def answer(self):
        action, self._future = self._future, None
        assert action is not None, "no request"
        return action, ()

    def update(self, wait=False):
        self.updates += 1

    def close(self):
        pass


class LoggedAdder:
    """Writes down what comes, and whether it is ready."""

    def __init__(self, name="", log=None, ready=True):
        self.name, self.log, self.is_ready = name, [] if log is None else log, ready
        self.rewards = []

    def ready(self):
        return self.is_ready

    def add_first(self, timestep):
        self.log.append(f"reset {self.name}")

    def add(self, action, timestep, extras):
        self.log.append(f"step {self.name}")
        self.rewards.append(timestep.reward.copy())

    def close(self, timeout=None):
        return 1


class NoPolicy(core.Policy):
    """Never acts: the ports do."""

    def initial_state(self, batch_size):
        return ()

    def step(self, observation, state):
        raise AssertionError("the ports act")


class LoggedAgent(core.Agent):
    """Logged adders, in the order in which they are made, and no tables. With `unroll`, on-policy."""

    make_tables = make_dataset = make_learner = None

    def __init__(self, adders, unroll=None):
        self.adders, self.unroll = adders, unroll

    max_policy_lag = property(lambda self: None if self.unroll is None else 0)
    unroll_length = property(lambda self: self.unroll)

    def make_networks(self, spec):
        return torch.nn.ModuleDict({"all": torch.nn.Linear(1, 1)})

    def make_policy(self, networks, evaluation=False):
        return NoPolicy()

    def make_adder(self, client, spec):
        return self.adders.pop(0)


class Source:
    """A learner that has just published every version."""

    def wait_for_version(self, version, timeout, actor=None):
        return True


@pytest.fixture
def make(monkeypatch):
    def make(envs=4, unroll=None, length=3, ready=(True, True), max_env_steps=None, log_period=1000):
        log, ports = [], []
        adders = [LoggedAdder(name, log, is_ready) for name, is_ready in zip("ab", ready, strict=True)]
        served = types.SimpleNamespace(log=log, ports=ports)
        monkeypatch.setattr(collector, "ServerPort", LoggedPort)

        def environment(num_envs, seed):
            return environments.make(
                lambda: EchoEnvironment(4, length, first=10), num_envs=num_envs, stepping="inline"
            )

        config = RunConfig(envs_per_actor=envs, inference="alternating+server", log_period=log_period)
        spec = specs.make_environment_spec(environment(1, 0))
        services = {
            "counter": make_client(Counter(max_env_steps)),
            "monitor": make_client(monitor := Monitor(InMemoryLogger())),
        }
        source = None if unroll is None else Source()
        setup = Setup(LoggedAgent(adders, unroll), environment, spec, config)
        worker = ActorWorker(setup, replay="a client", learner=source, inference=served, **services)
        worker.monitor = monitor
        return worker, log, ports, adders

    return make


def steps_of(worker, times):
    """The number of transitions of each of `times` steps."""
    made = []
    for _ in range(times):
        before = worker.save()["steps"]
        worker.step()
        made.append(worker.save()["steps"] - before)
    return made


def test_the_other_half_asks_before_this_one_steps(make):
    worker, log, *_ = make()
    made = steps_of(worker, 6)
    assert log == [
        *("reset a", "ask a", "step a"),  # nothing was observed before
        *("ask a", "reset b", "ask b", "step b"),
        *("ask b", "step a"),  # from here on one half's actions are computed while the other steps
        *("ask a", "step b"),
        *("ask b", "step a"),
        *("ask a", "step b"),
    ]
    assert made == [2] * 6


def test_nothing_is_asked_for_ahead_of_an_unroll(make):
    worker, log, *_ = make(unroll=2, length=100)
    for step in range(1, 13):
        worker.step()
        if step % 4 == 0:  # all that was asked for has been used
            assert sum(e.startswith("ask") for e in log) == sum(e.startswith("step") for e in log)
    assert log.count("ask a") == log.count("ask b") == 6


def test_a_half_that_begins_again_drops_what_it_had_asked_for(make):
    worker, log, _, _ = make(length=100, max_env_steps=7)
    assert steps_of(worker, 3) == [2, 2, 2]
    assert steps_of(worker, 1) == [1]  # of two envs: the second half resets at its next turn
    worker._budget = worker._gates[-1] = Budget("actor-0", make_client(Counter()), 4)
    assert steps_of(worker, 3) == [2, 2, 2]
    assert log.count("reset b") == 2 and log.count("reset a") == 1


def test_a_row_has_the_time_of_both_halves(make):
    worker, *_ = make(envs=3, length=1)
    worker.step(), worker.step()
    worker.close()
    row = worker.monitor.snapshot()["labels"]["actor-0"]
    names = ("reset", "select_action", "step", "observe")
    assert {f"time/{name}_s" for name in names} == {name for name in row if name.startswith("time/")}


@pytest.mark.parametrize("log_period", [1, 1000], ids=["after a row", "before a row"])
def test_readiness_is_that_of_the_half_whose_turn_it_is(make, log_period):
    worker, *_ = make(ready=(True, False), log_period=log_period)
    assert worker.ready()
    worker.step()
    assert not worker.ready()
    worker.close()
    assert worker.monitor.snapshot()["labels"]["actor-0"]["dropped_items"] == 2


def test_new_adders_begin_new_episodes(make):
    worker, log, _, adders = make(length=100)
    for _ in range(3):
        worker.step()
    del log[:]
    after: list = []
    adders += [LoggedAdder("new", after), LoggedAdder("new", after)]
    assert worker.recover(ServerLost("the server is gone"))
    for _ in range(3):
        worker.step()
    assert after == ["reset new", "step new", "reset new", "step new", "step new"]
    assert not any(entry.startswith(("reset", "step")) for entry in log)
    worker.close()
    assert worker.monitor.snapshot()["labels"]["actor-0"]["lost_items"] == 2


def test_items_that_were_lost_after_the_last_row_are_told(make, monkeypatch):
    worker, _, _, adders = make(log_period=1)
    for _ in range(2):
        for _ in range(3):
            worker.step()
        adders += [LoggedAdder(), LoggedAdder()]
        assert worker.recover(ServerLost("the server is gone"))
    monkeypatch.setattr(LoggedAdder, "close", lambda *_, timeout: 0)
    worker.close()
    assert worker.monitor.snapshot()["labels"]["actor-0"]["lost_items"] == 4


def test_halves_share_the_envs_and_their_seconds_are_told_once(make):
    worker, _, ports, _ = make(envs=5)
    assert [port.envs for port in ports] == [(3, 0, 5), (2, 3, 5)]  # Size, first env, and all envs.
    worker.step()
    assert sum(worker._collector.take_seconds().values()) > 0
    assert not any(worker._collector.take_seconds().values())
    worker.close()


def test_a_row_has_the_episodes_since_the_last_one_and_all_steps_so_far(make):
    worker, _, _, _ = make(log_period=1)
    for _ in range(12):
        worker.step()
    rows = worker.monitor.logger.rows
    assert [row["env_steps"] for row in rows] == [row["steps"] for row in rows]
    has_ended = [after["episodes"] > before["episodes"] for before, after in itertools.pairwise(rows)]
    assert ["episode_return" in row for row in rows[1:]] == has_ended and {*has_ended} == {True, False}
    worker.close()


def test_both_environments_are_closed_although_the_server_is_gone(make, monkeypatch):
    worker, _, ports, _ = make()
    closed = []
    for port, half in zip(ports, worker._collector._both, strict=True):
        monkeypatch.setattr(half.environment, "close", functools.partial(closed.append, port))
        monkeypatch.setattr(port, "close", functools.partial(closed.remove, "a server"))
    with pytest.raises(ValueError, match="not in list"):
        worker.close()
    assert closed == ports[::-1]


def test_an_action_before_the_first_time_step_is_refused():
    actor = PolicyActor(LoggedPort(types.SimpleNamespace(log=[], ports=[]), "port.0"))
    with pytest.raises(RuntimeError, match="observe_first"):
        actor.select_action(np.zeros(1))


def test_envs_that_begin_are_told_to_the_port():
    seen = []

    class Firsts(LoggedPort):
        def request(self, observation, first):
            seen.append(first.tolist())
            super().request(observation, first)

    actor = PolicyActor(Firsts(types.SimpleNamespace(log=[], ports=[]), "port.0"), num_envs=2)

    def timestep(kinds):
        return dm_env.TimeStep(np.array(kinds), np.zeros(2), np.ones(2), np.zeros((2, 1)))

    actor.observe_first(timestep([0, 0]))
    for kinds in ([1, 2], [1, 0], [1, 1]):
        action = actor.select_action(np.zeros((2, 1)))
        actor.observe(action, timestep(kinds))
    actor.select_action(np.zeros((2, 1)))
    assert seen == [[True, True], [False, False], [False, True], [False, False]]
