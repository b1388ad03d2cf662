"""The learner of a plan, which branches of the plan use from several threads."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from agents.flow_dqn import FlowDQN, FlowDQNConfig
from framework import environments, specs
from framework.programs import RunConfig
from framework.programs.plan_worker import PlanLearner
from framework.programs.services import Counter
from framework.programs.worker import Setup


class Interleaving(Counter):
    """While a publication counts its steps, another thread tries to make one."""

    learner: PlanLearner | None = None
    thread: threading.Thread | None = None

    def increment(self, **counts):
        if self.learner is not None and self.thread is None:
            self.thread = threading.Thread(target=self.learner.apply, args=({},))
            self.thread.start()
            self.thread.join(0.5)  # Ends at once, unless the learner makes it wait.
        return super().increment(**counts)


def test_steps_during_a_publication_are_counted_once():
    with environments.make("gymnasium:CartPole-v1") as environment:
        spec = specs.make_environment_spec(environment)
    setup = Setup(FlowDQN(FlowDQNConfig(hidden_sizes=(4,))).for_program(1), None, spec, RunConfig())
    counter, monitor = Interleaving(), SimpleNamespace(write=lambda *_: None)
    learner = PlanLearner(setup, counter=counter, monitor=monitor)
    learner.learner.apply = lambda _: SimpleNamespace(metrics={})
    for _ in range(3):
        learner.apply({})
    counter.learner = learner
    learner.publish()
    counter.thread.join(30)
    learner.publish()
    assert counter.get_counts()["learner_steps"] == learner.block.version == 4
