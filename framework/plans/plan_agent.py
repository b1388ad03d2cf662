"""The base class of agents whose algorithm is a plan; see `framework.flow`."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

from typing_extensions import Self

from framework import core, flow
from framework.plans.rollout_worker import RolloutWorker
from framework.torch_agents import TorchAgent


class PlanAgent(TorchAgent):
    """An agent that is a plan over workers and a learner:

    ```python
    class A2C(PlanAgent, OnPolicyAgent):
        def plan(self, workers, learner):
            return Par(workers, RolloutWorker.sample).sync().map(concatenate).map(learner.step)
    ```

    `make_program` makes `num_actors` nodes with a worker each, the node of the learner, which takes the items
    of the plan until the program ends, and the evaluator.

    Attributes:
      worker_class: class of the objects in the worker nodes.
    """

    worker_class: type[RolloutWorker] = RolloutWorker

    @abc.abstractmethod
    def plan(self, workers: Sequence[flow.Node], learner: Any) -> flow.Flow:
        """The plan. Its items are not used: the learner counts, publishes and logs its own steps.

        Args:
          workers: the nodes of the `worker_class`.
          learner: the `PlanLearner`, in the process of the plan.
        """

    def build(self, graph: core.Graph) -> None:
        graph.add_evaluator(graph.add_plan())

    def for_worker(self, num_envs: int) -> Self:
        """A copy for a worker with tables of its own: its batches have its `num_envs` envs, on the CPU."""
        agent = self.for_program(num_envs)
        agent.config = dataclasses.replace(agent.config, device="cpu")
        return agent

    def check_shards(self) -> None:
        core.Agent.check_shards(self)  # A plan has one learner.
