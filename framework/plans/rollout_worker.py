"""The worker in a node of a plan: it collects data when the plan asks for it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tree

import launch
from framework import adders, core
from framework.actors import PolicyActor
from framework.datasets import Dataset
from framework.learners import SGDLearner
from framework.networks import as_numpy, as_tensors
from framework.replay import EmbeddedClient, ReplaySample
from framework.replay.errors import ServerClosed
from framework.types import Gradients
from framework.workers.collector import Steps, make_collector
from framework.workers.gates import Budget, Gate
from framework.workers.last_samples import LastSamples
from framework.workers.report import Report
from framework.workers.worker import Setup, make_tables, next_seed, prepare_process


class BudgetSpent(Exception):
    """Too few env steps are left for what the plan asked for. The plan goes on to learn from replay."""


class PlanOver(BudgetSpent):
    """Nothing is left to learn either: replay has the worker's items, and allows no further sample."""


class RolloutWorker:
    """Steps the envs of one node of a plan with a `Collector`, in calls of the plan; see `flow.Par`.

    ```python
    plan = Par(workers, RolloutWorker.sample).sync().map(concatenate).map(learner.step)
    ```

    The worker asks the counter for the env steps of a whole call, and reports them at its next call. The
    program therefore makes exactly `max_env_steps`, and which rounds of a `sync` plan are complete does not
    depend on the engine.

    The worker of an agent overrides `make_policy` or `make_adder`, or adds methods that call `step_envs`
    within `granted`.

    Args:
      setup: makes the environment, the networks, the policy, the adder, and without `replay` the tables and
        the dataset.
      learner: the variable source. None for an agent without parameters.
      counter: a client of the `Counter`, which grants and counts steps.
      monitor: takes the rows of metrics.
      replay: the replay client of the adder. None: the worker keeps tables of its own, for `sample`.
      checkpointer: keeps the counts of this worker. None keeps nothing.
      index: index of this worker, whose name is `actor-INDEX`.
      steps_name: name of the count of the learner's steps.
      seed: seed of this worker's environments and policy; see `next_seed`.

    Attributes:
      name: name of the worker.
      agent: the agent.
      spec: the `EnvironmentSpec` of one env.
      networks: the networks that act.
      collector: steps the envs.
      dataset: the agent's batches of what the worker has collected; None with `replay`.
      is_over: whether the last call has raised `PlanOver`.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        learner: Any,
        counter: Any,
        monitor: Any,
        replay: Any = None,
        checkpointer: Any = None,
        index: int = 0,
        steps_name: str = "learner_steps",
        seed: int = 0,
    ):
        self.name, self.agent, self.spec = f"actor-{index}", setup.agent, setup.spec
        self.dataset: Dataset | None = None
        if replay is None:
            replay = EmbeddedClient(make_tables(setup, seed), concurrent=False)
            self.dataset = setup.agent.make_dataset(replay)
        prepare_process(seed)
        state = None if checkpointer is None else checkpointer.get(self.name)
        seed, make_adder = next_seed(seed, state), functools.partial(self.make_adder, replay)
        self.collector = make_collector(setup, index, seed, learner, self._make_policy, make_adder)
        budget = Budget(self.name, counter, setup.config.envs_per_actor)
        services = {"counter": counter, "monitor": monitor, "checkpointer": checkpointer}
        self._report = Report(
            setup, self.collector, budget, state, name=self.name, steps_name=steps_name, **services
        )
        self._last = Gate()  # What is in tables of its own is learned from at once.
        if self.dataset is None:
            self._last = LastSamples(self.name, replay, counter, steps_name, self.collector)
        self.is_over = False
        self._busy = threading.Lock()  # `close` waits for the call in progress, which a stop ends.
        self._finished = False

    def make_policy(self, networks: Any) -> core.Policy:
        """The policy that acts with `networks`. Called by the constructor, before `make_adder`."""
        return self.agent.make_policy(networks)

    def make_adder(self, client: Any) -> adders.Adder:
        """The adder of the experience. Also called when the server of `client` was lost and is back."""
        return self.agent.make_adder(client, self.spec)

    def _make_policy(self, networks: Any) -> core.Policy:
        self.networks = networks
        return self.make_policy(networks)

    def sample(self) -> ReplaySample:
        """Collects one unroll of every env with the newest parameters.

        Returns:
          A batch of the agent's dataset, in numpy: leaves `[B, T + 1, ...]`.

        Raises:
          BudgetSpent: Fewer env steps are left than an unroll may need.
        """
        assert self.dataset is not None, "sample: this worker writes into replay. Use collect(steps)."
        with self._busy:
            self._collect(self.agent.unroll_length)
            sample = next(self.dataset)
        return sample._replace(data=as_numpy(sample.data))

    def collect(self, steps: int) -> int:
        """Makes `steps` steps of every env with the newest parameters, whose items go to replay.

        Returns:
          The number of env steps. Those that begin an episode do not count.

        Raises:
          BudgetSpent: Fewer env steps are left.
        """
        with self._busy:
            self._collect(steps)
            return self._report.budget.spent

    @contextlib.contextmanager
    def granted(self, steps: int) -> Iterator[None]:
        """Takes the newest parameters, and the program's budget for `steps` calls of `step_envs`.

        Raises:
          BudgetSpent: Fewer env steps are left.
        """
        with self._busy:
            self._begin(steps)
            yield
            self.collector.actor.flush_pending()

    @contextlib.contextmanager
    def updated(self) -> Iterator[None]:
        """Takes the newest parameters, for a call that makes no env steps. It reports none, either."""
        with self._busy:
            self.collector.update()
            yield

    def step_envs(self, most: int = 1) -> int:
        """Up to `most` steps of every env; returns how many. Raises `launch.ProgramStopped` at a stop."""
        stopped = launch.stop_event()
        if stopped.is_set():
            raise launch.ProgramStopped(f"{self.name}: the program stops.")
        return self._took(self.collector.collect(most, self._report.budget.left, stopped.is_set))

    def finish(self) -> None:
        """Makes the env steps that are left of the program's budget. Their data is dropped."""
        with self._busy:
            if not self._finished:
                self._report.dropped_items += self.collector.close_adder(timeout=0.0)
                while self._report.budget.left > 0 or self._report.budget.ask(1):
                    self.step_envs()
            self._finish()

    def save(self) -> dict[str, Any]:
        """See `Report.save`."""
        return self._report.save()

    def close(self) -> None:
        """Reports the last counts, saves the state for the last checkpoint, and closes the environments."""
        with self._busy:
            try:
                self._finish()
            finally:
                self.collector.close()
        if self.dataset is not None:
            self.dataset.close()

    def _collect(self, steps: int) -> bool:
        """Makes `steps` steps of every env; returns False if the replay server was lost meanwhile."""
        try:
            self._begin(steps)
            while steps > 0:
                steps -= self.step_envs(steps)
            self.collector.actor.flush_pending()
        except ServerClosed as error:
            if launch.stop_event().is_set():
                raise launch.ProgramStopped(f"{self.name}: the program stops.") from None
            if not self.collector.recover(error):
                raise
            self._took(self.collector.collect(1, 0))  # The steps before the error; no others.
            return False
        return True

    def _took(self, steps: Steps) -> int:
        self._report.budget.took(steps)
        self._report.took(steps)
        return steps.calls

    def _begin(self, steps: int) -> None:
        self.collector.update()
        # After `finish`, what is granted would never be spent.
        wanted = steps * self.collector.environment.num_envs
        spent = self._finished or self._report.budget.ask(steps) < wanted
        self.is_over = spent and (self._finished or self._last.open())
        if spent:
            # What resets would save does not count, so that the order of the workers does not matter. The
            # steps are made in `finish`, when the learner has published its last parameters.
            error = PlanOver if self.is_over else BudgetSpent
            raise error(f"{self.name}: too few env steps are left for {steps} steps of every env.")

    def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._report.dropped_items += self.collector.close_adder(timeout=0.2)
            self._report.budget.end()
            self._report.end()


class GradientWorker(RolloutWorker):
    """A `RolloutWorker` that also computes the gradients of what it collects.

    ```python
    plan = Par(workers, GradientWorker.sample).map(GradientWorker.gradients).unordered().map(learner.apply)
    ```
    """

    _learner: SGDLearner

    def gradients(self, sample: ReplaySample) -> Gradients:
        """The gradients of the agent's loss on a batch, with the parameters that collected it, in numpy."""
        assert isinstance(self.collector.actor, PolicyActor)
        self._learner.steps, self._learner.env_steps = self.collector.actor.policy.progress
        return as_numpy(self._learner.gradients(sample._replace(data=as_tensors(sample.data))))

    def make_policy(self, networks: Any) -> core.Policy:
        self._learner = self.agent.make_learner(networks, self.spec)  # type: ignore[assignment]
        policy = super().make_policy(networks)
        policy.variables = ()  # All of them, for the loss.
        return policy


def stack(samples: Sequence[ReplaySample]) -> ReplaySample:
    """Stacks batches along a new first axis, in their order."""
    return tree.map_structure(lambda *leaves: np.stack(leaves), *samples)


def concatenate(samples: Sequence[ReplaySample]) -> ReplaySample:
    """Joins batches of several workers along their first axis, in their order."""
    return tree.map_structure(lambda *leaves: np.concatenate(leaves), *samples)
