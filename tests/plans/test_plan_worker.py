"""The learner of a plan, which branches of the plan use from several threads."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import launch
from agents.a2c import A2C, A2CConfig
from agents.dqn import DQNConfig
from examples.flows import DQNPlan
from framework import environments, specs
from framework.flow import Flow, LocalNode, Par, concurrent
from framework.plans.plan_worker import PlanLearner, PlanWorker
from framework.plans.rollout_worker import PlanOver
from framework.programs import RolloutWorker, RunConfig, make_program
from framework.replay import EmbeddedClient, ReplaySample, SampleInfo
from framework.runs.services import Counter
from framework.types import Gradients, StepResult
from framework.workers.learner import ProgramLearner
from framework.workers.worker import Setup

DQN = DQNConfig(hidden_sizes=(4,))
GRADIENTS = Gradients([], torch.zeros(()), {}, torch.tensor(7))


def make_setup(agent, config=DQN, **settings):
    with environments.make("gymnasium:CartPole-v1") as environment:
        spec = specs.make_environment_spec(environment)
    return Setup(agent(config).for_program(1), None, spec, RunConfig(**settings))


class TwoBranches(DQNPlan):
    def plan(self, workers, learner):
        learner.learner.apply = lambda _: StepResult({})
        steps = Flow.of(itertools.repeat(GRADIENTS)).map(learner.apply)
        return concurrent(steps, Flow.of(itertools.repeat(0)), threads=True)


class Interleaving(Counter):
    """While a publication counts its steps, another thread tries to make one."""

    learner: PlanLearner | None = None
    thread: threading.Thread | None = None

    def increment(self, **counts):
        if self.learner is not None and self.thread is None:
            self.thread = threading.Thread(target=self.learner.apply, args=(GRADIENTS,))
            self.thread.start()
            self.thread.join(0.5)  # Ends at once, unless the learner makes it wait.
        return super().increment(**counts)


def test_steps_during_a_publication_are_counted_once():
    counter, monitor = Interleaving(), SimpleNamespace(write=lambda *_: None)
    program = ProgramLearner(make_setup(DQNPlan), counter=counter, monitor=monitor)
    learner = PlanLearner(program, "cpu")
    learner.learner.apply = lambda _: StepResult({})
    for _ in range(3):
        learner.apply(GRADIENTS)
    counter.learner = learner
    learner.publish()
    counter.thread.join(30)
    learner.publish()
    assert counter.get_counts()["learner_steps"] == program.published.block.version == 4


def test_gradients_are_applied_with_the_threads_of_the_learner():
    before, found = torch.get_num_threads(), []
    monitor = SimpleNamespace(write=lambda *_: None)
    learner = ProgramLearner(
        make_setup(DQNPlan, learner_threads=before + 1), counter=Counter(), monitor=monitor
    )

    def apply(_):
        found.append(torch.get_num_threads())
        return StepResult({})

    learner.learner.apply = apply
    try:
        learner.apply(GRADIENTS)
    finally:
        torch.set_num_threads(before)
    assert found == [before + 1]


def test_the_age_of_gradients_after_a_restart_of_the_learner():
    counter, written = Counter(), []
    monitor = SimpleNamespace(write=lambda _, row: written.append(row))
    saved = ProgramLearner(make_setup(DQNPlan), counter=Counter(), monitor=monitor).published.state()
    checkpointer = SimpleNamespace(get=lambda _: {**saved, "steps": 5}, put=lambda *_: None)
    counter.increment(learner_steps=8)  # Three are lost.
    services = {"counter": counter, "monitor": monitor, "checkpointer": checkpointer}
    learner = ProgramLearner(make_setup(DQNPlan, learner_log_period=1), **services)
    version = learner.published.block.version
    gradients = [() for _ in learner.learner._parameters]
    for _ in range(2):
        learner.apply(Gradients(gradients, torch.zeros(()), {}, torch.tensor(version)))
    assert [row["gradient_age"] for row in written] == [0, 1]


def test_rows_after_the_loss_of_another_learner_are_of_the_steps_since_then():
    setup, written, state = make_setup(DQNPlan, learner_log_period=5), [], {}
    learner = ProgramLearner(
        setup,
        replay=EmbeddedClient(setup.agent.make_tables(setup.spec), concurrent=False),
        counter=Counter(),
        monitor=SimpleNamespace(write=lambda _, row: written.append(row)),
        checkpointer=SimpleNamespace(get=state.get, put=state.__setitem__),
    )
    learner.published.save_first()
    learner.learner.step = lambda _: StepResult({})
    info = SampleInfo(*[np.full(2, 3)] * len(SampleInfo._fields))
    for _ in range(4):
        learner.step(ReplaySample(info, {}))
    learner.report.waited_s = 1e6
    learner.go_back(RuntimeError("lost"))
    while not written:
        learner.step(ReplaySample(info, {}))
    assert written[0]["times_sampled"] == 3
    assert written[0]["time/waited_for_data_fraction"] < 1


def test_the_worker_ends_after_the_last_step_has_ended_the_program():
    ended = []

    def finish(*arguments):
        time.sleep(0.3)  # The other branch has items meanwhile.
        ended.append(arguments)

    monitor = SimpleNamespace(write=lambda *_: None, finish=finish)
    worker = PlanWorker(
        make_setup(TwoBranches, max_learner_steps=5), workers=[None], counter=Counter(), monitor=monitor
    )
    while not worker.finished():
        worker.step()
    assert ended[0] == ("max_learner_steps", {"learner_steps": 5})
    worker.close()


def test_a_worker_that_was_restored_without_steps_left_ends_the_program():
    ended, counter = [], Counter()
    counter.increment(learner_steps=5)
    monitor = SimpleNamespace(write=lambda *_: None, finish=lambda *arguments: ended.append(arguments))
    saved = ProgramLearner(make_setup(TwoBranches), counter=Counter(), monitor=monitor).published.state()
    checkpointer = SimpleNamespace(get=lambda _: {**saved, "steps": 5}, put=lambda *_: None)
    services = {"counter": counter, "monitor": monitor, "checkpointer": checkpointer}
    worker = PlanWorker(make_setup(TwoBranches, max_learner_steps=5), workers=[None], **services)
    assert worker.ready()
    worker.step()
    assert worker.finished() and ended == [("max_learner_steps", {"learner_steps": 5})]
    worker.close()


class OneOfTwo(A2C):
    def plan(self, workers, learner):
        step = Par(workers[:1], RolloutWorker.sample).unordered().map(learner.step)
        return step if self.config.discount < 1 else (result for result in step)


def test_a_plan_that_calls_one_of_two_workers_ends_with_the_budget():
    config = RunConfig(num_actors=2, envs_per_actor=1, max_env_steps=100, evaluate_period=None)
    program = make_program(OneOfTwo(A2CConfig(hidden_sizes=(4,))), "gymnasium:CartPole-v1", config)
    assert launch.launch(program, "serial")["env_steps"] == 100


class Rollouts:
    """Has some items, and is over after them; its calls are carried out at once."""

    def __init__(self, items: int):
        self.left, self.is_over, self.finished = items, False, False
        self.futures = SimpleNamespace(call=lambda step, args: LocalNode(self).call(step, *args))

    def take(self) -> int:
        if not self.left:
            self.is_over = True
            raise PlanOver
        self.left -= 1
        return 1

    def finish(self) -> None:
        self.finished = True


class FirstTwo(A2C):
    def plan(self, workers, learner):
        items = Par(workers[:2], Rollouts.take)
        return items.sync() if self.config.discount < 1 else items.unordered()


@pytest.mark.parametrize("discount", [0.9, 1.0], ids=["sync", "unordered"])
def test_a_plan_is_over_when_all_workers_that_it_calls_are(discount, monkeypatch):
    monkeypatch.setattr(RolloutWorker, "finish", Rollouts.finish)
    monitor = SimpleNamespace(write=lambda *_: None)
    workers = [Rollouts(1), Rollouts(4), Rollouts(9)]
    setup = make_setup(FirstTwo, A2CConfig(discount=discount, hidden_sizes=(4,)))
    worker = PlanWorker(setup, workers=workers, counter=Counter(), monitor=monitor)
    for _ in range(20):
        if not worker.finished():
            worker.step()
    assert worker.finished() and [each.left for each in workers] == [0, 0, 9]
    assert all(each.finished for each in workers)
    worker.close()


def test_a_plan_that_is_no_flow_is_refused():
    setup = make_setup(OneOfTwo, A2CConfig(discount=1.0))
    with pytest.raises(TypeError, match="plan: got generator, expected"):
        PlanWorker(setup, workers=[None], counter=Counter(), monitor=None)
