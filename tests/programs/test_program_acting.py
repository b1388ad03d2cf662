"""Halves that alternate: who asks when, what is dropped, what is kept of both."""

import dm_env
import numpy as np
import pytest

from framework import environments
from framework.actors.inference_client import InferenceActor, Port
from framework.environments.testing import EchoEnvironment
from framework.programs.acting import Acting, Half


class LoggedPort(Port):
    """The action is 1 in every env; writes down who asked when."""

    def __init__(self, name, log):
        self._name, self._log = name, log
        self._asked = None
        self.updates = 0

    def request(self, observation, first):
        assert self._asked is None, "asked twice"
        self._asked = np.ones(len(observation), np.int64)
        self._log.append(f"ask {self._name}")

    def answer(self):
        action, self._asked = self._asked, None
        assert action is not None, "nobody asked"
        return action, ()

    def update(self, wait=False):
        self.updates += 1

    def save(self):
        return f"state of {self._name}"


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


def make(sizes=(2, 2), hold_period=None, length=3, ready=(True, True)):
    log, halves = [], []
    for index, (name, size) in enumerate(zip("ab", sizes, strict=True)):
        environment = environments.make(
            lambda: EchoEnvironment(4, length, first=10), num_envs=size, stepping="inline"
        )
        adder = LoggedAdder(name, log, ready[index])
        actor = InferenceActor(LoggedPort(name, log), adder, size)
        halves.append(Half(environment, actor, should_update=index == 0))
    return Acting(halves, hold_period=hold_period), log


def test_the_other_half_asks_before_this_one_steps():
    acting, log = make()
    made = [acting.step()[0] for _ in range(6)]
    assert log == [
        *("reset a", "ask a", "step a"),  # nobody has seen anything yet
        *("ask a", "reset b", "ask b", "step b"),
        *("ask b", "step a"),  # from here on one half's actions are computed while the other steps
        *("ask a", "step b"),
        *("ask b", "step a"),
        *("ask a", "step b"),
    ]
    assert made == [2] * 6


def test_nothing_is_asked_for_ahead_of_a_boundary():
    acting, log = make(hold_period=4, length=100)
    for step in range(1, 13):
        acting.step()
        if step % 4 == 0:  # all that was asked for has been used
            assert sum(e.startswith("ask") for e in log) == sum(e.startswith("step") for e in log)
    assert log.count("ask a") == log.count("ask b") == 6


def test_a_half_that_begins_anew_drops_what_it_had_asked_for():
    acting, log = make(length=100)
    made = [acting.step()[0] for _ in range(3)]
    made.append(acting.step(max_steps=1)[0])  # of two envs: the second half resets when it is its turn again
    made += [acting.step()[0] for _ in range(3)]
    assert log.count("reset b") == 2 and log.count("reset a") == 1
    assert made == [2, 2, 2, 1, 2, 2, 2]


def test_time_is_that_of_both_halves():
    acting, _ = make(sizes=(2, 1), length=1)
    acting.step(), acting.step()
    assert set(acting.take_seconds()) == {"reset", "select_action", "step", "observe"}


def test_parameters_are_asked_for_once_a_step_of_all_envs():
    acting, _ = make()
    for _ in range(8):
        acting.step()
    ports = [half.actor.port for half in acting.halves]
    assert [port.updates for port in ports] == [4, 0]
    acting.update()
    assert [port.updates for port in ports] == [5, 1]
    assert acting.save() == {"policy": "state of a"}


def test_readiness_is_that_of_the_half_whose_turn_it_is():
    acting, _ = make(ready=(True, False))
    assert acting.ready()
    acting.step()
    assert not acting.ready()
    assert acting.close_adders(timeout=0.0) == 2


def test_new_adders_begin_new_episodes():
    acting, log = make(length=100)
    for _ in range(3):
        acting.step()
    del log[:]
    after: list = []
    assert acting.replace_adders(lambda: LoggedAdder("new", after)) == 2
    for _ in range(3):
        acting.step()
    assert after == ["reset new", "step new", "reset new", "step new", "step new"]
    assert not any(entry.startswith(("reset", "step")) for entry in log)


def test_an_action_before_the_first_time_step_is_refused():
    actor = InferenceActor(LoggedPort("a", []))
    with pytest.raises(RuntimeError, match="observe_first"):
        actor.select_action(np.zeros(1))


def test_envs_that_begin_are_told_to_the_port():
    seen = []

    class Firsts(LoggedPort):
        def request(self, observation, first):
            seen.append(first.tolist())
            super().request(observation, first)

    actor = InferenceActor(Firsts("a", []), num_envs=2)

    def timestep(kinds):
        return dm_env.TimeStep(np.array(kinds), np.zeros(2), np.ones(2), np.zeros((2, 1)))

    actor.observe_first(timestep([0, 0]))
    for kinds in ([1, 2], [1, 0], [1, 1]):
        action = actor.select_action(np.zeros((2, 1)))
        actor.observe(action, timestep(kinds))
    actor.select_action(np.zeros((2, 1)))
    assert seen == [[True, True], [False, False], [False, True], [False, False]]
