"""Callbacks run on the objects of the launching process, on every engine."""

from __future__ import annotations

import os
import pathlib
import threading

import numpy as np
import optuna
import pytest

import launch
from agents.ppo import PPO, PPOConfig
from agents.random_actions import RandomActions
from framework.environments.testing import FakeEnvironment
from framework.programs import Callback, RunConfig, make_program
from framework.runs import callbacks as module
from framework.runs.callbacks import CallbackHost, Mailbox

CARTPOLE = "gymnasium:CartPole-v1"


class Journal(Callback):
    """Keeps each event, and counts the evaluations across resumes."""

    step_period = 100

    def __init__(self, stop_at: int = 10**9):
        self.events, self.evaluations, self.stop_at = [], 0, stop_at
        self.lock = threading.Lock()  # It cannot be pickled.

    def note(self, name, *event):
        self.events.append((name, os.getpid(), *event))

    def on_start(self):
        self.note("start", self.evaluations)

    def on_step(self, steps, snapshot):
        assert snapshot["counts"]["env_steps"] == steps
        self.note("step", steps)

    def on_row(self, label, row, snapshot):
        assert snapshot["labels"][label].items() >= row.items()
        self.note("row", label)
        row.clear()  # It is a copy.

    def on_evaluation(self, label, row):
        self.evaluations += 1
        self.note("evaluation", label, row["env_steps"])
        if self.evaluations == self.stop_at:
            launch.stop({"reason": "enough"})

    def on_checkpoint(self, path):
        self.note("checkpoint", path, pathlib.Path(path, "manifest.json").exists())

    def on_end(self, result):
        self.note("end", result)

    def save(self):
        return {"evaluations": self.evaluations}

    def restore(self, state):
        self.evaluations = state["evaluations"]

    def of(self, name):
        return [event[2:] for event in self.events if event[0] == name]


def config(tmp_path, **settings) -> RunConfig:
    usual = {
        "max_env_steps": 1_000_000,
        "log_period": 40,
        "evaluate_period": 100,
        "num_evaluation_episodes": 1,
    }
    return RunConfig(directory=str(tmp_path / "run"), **{**usual, **settings})


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_events_change_the_given_object_and_its_state_comes_back(engine, tmp_path):
    first = Journal(stop_at=3)
    program = make_program(RandomActions(), FakeEnvironment, config(tmp_path), callbacks=[first])
    assert launch.launch(program, engine) == {"reason": "enough"}
    assert {pid for _, pid, *_ in first.events} == {os.getpid()}
    assert first.events[0][::2] == ("start", 0) and first.events[-1][2:] == ({"reason": "enough"},)
    made = first.evaluations  # Nodes of other processes go on until the stop arrives.
    rows = [label for (label,) in first.of("row")]
    assert made == len(first.of("evaluation")) == rows.count("evaluator") >= 3 and "actor-0" in rows
    assert {label for label, _ in first.of("evaluation")} == {"evaluator"}
    newest = sorted((tmp_path / "run" / "checkpoints").glob("checkpoint-*"))[-1]
    assert first.of("checkpoint")[-1] == (str(newest), True)
    assert made == 3 or engine != "serial"
    steps = np.array(first.of("step"))
    assert len(steps) > 1 and (np.diff(steps, axis=0) >= 100).all()

    again = Journal(stop_at=made + 1)
    engine = "threads" if engine == "serial" else engine  # An ended run is not extended on `serial`.
    program = make_program(RandomActions(), FakeEnvironment, config(tmp_path), callbacks=[again])
    assert launch.launch(program, engine) == {"reason": "enough"}
    assert (
        again.events[0][::2] == ("start", 3) and again.evaluations == 4 and len(again.of("evaluation")) == 1
    )


class Watch(Callback):
    def __init__(self):
        self.seen, self.policies = [], []

    def on_evaluation(self, label, row):
        policy = self.policy()
        self.policies.append(policy)
        self.seen.append((policy(np.zeros((3, 4), np.float32)).shape, policy.step, row["env_steps"]))

    def on_end(self, result):
        with pytest.raises(launch.LaunchError, match="its nodes have ended"):
            self.policy()
        self.seen.append("end")


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_a_callback_acts_with_the_parameters_of_the_moment(engine):
    steps = 2048 if engine == "serial" else 8192  # There, the run has to outlast the first call.
    run = RunConfig(max_env_steps=steps, evaluate_period=1024, num_evaluation_episodes=1, envs_per_actor=4)
    agent, watch = PPO(PPOConfig(unroll_length=8, minibatch_size=None, epochs=1)), Watch()
    with pytest.raises(launch.LaunchError, match="got no running program"):
        watch.policy()
    launch.launch(make_program(agent, CARTPOLE, run, callbacks=[watch]), engine)
    *seen, end = watch.seen
    assert end == "end" and len(seen) >= 2 and all(shape == (3,) for shape, _, _ in seen)
    assert 0 <= seen[0][1] < seen[-1][1]
    before, after = (
        dict(policy.networks.named_parameters()) for policy in (watch.policies[0], watch.policies[-1])
    )
    assert not all(bool((before[name] == after[name]).all()) for name in before)


class Prune(Callback):
    def __init__(self, trial):
        self.trial = trial

    def on_evaluation(self, label, row):
        self.trial.report(row["episode_return"], row["env_steps"])
        if self.trial.should_prune():
            raise optuna.TrialPruned


def test_a_study_in_memory_prunes_a_run(tmp_path):
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(lower=1e9, n_warmup_steps=150))

    def objective(trial):
        run = config(tmp_path, evaluate_period=100)
        program = make_program(RandomActions(), FakeEnvironment, run, callbacks=[Prune(trial)])
        launch.launch(program, "processes")

    study.optimize(objective, n_trials=1)
    (trial,) = study.trials
    assert trial.state.name == "PRUNED" and len(trial.intermediate_values) >= 1


class Fails(Callback):
    def __init__(self, event):
        setattr(self, event, self.fail)

    def fail(self, *_):
        raise LookupError("of a callback")


@pytest.mark.parametrize("event", ["on_start", "on_step", "on_checkpoint", "on_end", "save"])
def test_an_error_of_any_event_is_that_of_the_launch(event, tmp_path):
    run = config(tmp_path, max_env_steps=200)
    program = make_program(RandomActions(), FakeEnvironment, run, callbacks=[Fails(event)])
    with pytest.raises(LookupError, match="of a callback"):
        launch.launch(program, "serial")


def test_two_programs_of_one_process_stop_each_by_their_own_callback(tmp_path):
    results = {}

    def one(number):
        journal = Journal(stop_at=number)
        run = config(tmp_path / str(number))
        program = make_program(RandomActions(), FakeEnvironment, run, callbacks=[journal])
        results[number] = launch.launch(program, "processes"), journal.evaluations >= number

    threads = [threading.Thread(target=one, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {number: ({"reason": "enough"}, True) for number in (1, 2)}


def test_a_mailbox_keeps_the_order_and_ends_the_waits(monkeypatch):
    box = Mailbox()
    box.begin({"0 Journal": 1})
    assert box.exchange(None, 0.0) == ("start", {"0 Journal": 1})
    answered = []
    caller = threading.Thread(target=lambda: answered.append(box.call("checkpoint", "a")))
    caller.start()
    assert box.exchange({"0 Journal": 2}, 5.0) == ("checkpoint", "a")
    assert box.exchange(None, 0.0) == ("checkpoint", "a")  # No answer yet, as after a lost message.
    assert not answered and box.exchange({"0 Journal": 3}, 0.0) is None
    caller.join(5)
    assert answered == [{"0 Journal": 3}]
    monkeypatch.setattr(module, "_LONGEST_S", 0.01)
    with pytest.raises(TimeoutError, match="no end of"):
        box.call("checkpoint", "b")
    box.close()
    assert box.call("checkpoint", "c") == {"0 Journal": 3}  # Nothing waits for an answer any more.
    assert box.exchange(None, 0.0) == ("checkpoint", "b") and box.exchange({}, 0.0) == ("close",)


def test_a_restarted_monitor_does_not_start_the_callbacks_again():
    journal = Journal()
    host = CallbackHost([journal], lambda job: None)
    host.begin({"0 Journal": {"evaluations": 5}})
    host.begin({"0 Journal": {"evaluations": 1}})
    assert journal.of("start") == [(5,)] and journal.evaluations == 5
