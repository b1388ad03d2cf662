"""The worker in a node of a plan: it collects data when the plan asks for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tree

import launch
from framework import core
from framework.datasets import Dataset
from framework.learners import SGDLearner
from framework.networks import as_numpy, as_tensors
from framework.programs.actor_worker import ActorWorker
from framework.programs.worker import Setup, make_tables
from framework.replay import EmbeddedClient, ReplaySample
from framework.replay.errors import ServerClosed
from framework.types import Gradients


class BudgetSpent(Exception):
    """Too few env steps are left for what the plan asked for. The plan ends."""


class RolloutWorker(ActorWorker):
    """Steps the envs of one node of a plan, in calls of the plan; see `flow.Par`.

    ```python
    plan = Par(workers, RolloutWorker.sample).sync().map(concatenate).map(learner.step)
    ```

    The worker asks the counter for the env steps of a whole call, and reports them at its next call. The
    program therefore makes exactly `max_env_steps`, and which rounds of a `sync` plan are complete does not
    depend on the engine.

    Args:
      setup: makes the environment, the networks, the policy, the adder, and without `replay` the tables and
        the dataset.
      replay: the replay client of the adder. None: the worker keeps tables of its own, for `sample`.
      seed: seed of this worker, from which its environments and its policy derive their seeds.
      **options: `learner`, `counter`, `monitor`, `checkpointer` and `index` of an `ActorWorker`.
    """

    def __init__(self, setup: Setup, *, replay: Any = None, seed: int = 0, **options: Any):
        self._dataset: Dataset | None = None
        if replay is None:
            replay = EmbeddedClient(make_tables(setup, seed), concurrent=False)
            self._dataset = setup.agent.make_dataset(replay)
        super().__init__(setup, replay=replay, seed=seed, **options)
        self._unroll_length = setup.agent.unroll_length if self._dataset else 0
        self._lockstep = None  # The plan decides when an unroll begins, and when the program ends.
        self._busy = threading.Lock()  # `close` waits for the call in progress, which a stop ends.

    def sample(self) -> ReplaySample:
        """Collects one unroll of every env with the newest parameters.

        Returns:
          A batch of the agent's dataset, in numpy: leaves `[B, T + 1, ...]`.

        Raises:
          BudgetSpent: Fewer env steps are left than an unroll may need.
        """
        assert self._dataset is not None, "sample: this worker writes into replay. Use collect(steps)."
        with self._busy:
            self._collect(self._unroll_length)
            sample = next(self._dataset)
        return sample._replace(data=as_numpy(sample.data))

    def collect(self, steps: int) -> int:
        """Makes `steps` steps of every env with the newest parameters, whose items go to replay.

        Returns:
          The number of env steps. Those that begin an episode do not count.

        Raises:
          BudgetSpent: Fewer env steps are left.
        """
        with self._busy:
            self._collect_or_recover(steps)
            return self._spent

    def finish(self) -> None:
        """Makes the env steps that are left of the program's budget. Their data is dropped."""
        with self._busy:
            if not self._finished:
                self._spend_rest()
                self._finish()

    def close(self) -> None:
        with self._busy:
            super().close()
        if self._dataset is not None:
            self._dataset.close()

    def _collect_or_recover(self, steps: int) -> bool:
        """Makes `steps` steps of every env; returns False if the replay server was lost meanwhile."""
        try:
            self._collect(steps)
        except ServerClosed as error:
            if launch.stop_event().is_set():
                raise launch.ProgramStopped(f"{self._name}: the program stops.") from None
            if not self.recover(error):
                raise
            return False
        return True

    def _collect(self, steps: int) -> None:
        self._begin(steps)
        for _ in range(steps):
            self._step_envs()

    def _begin(self, steps: int) -> None:
        """Takes the newest parameters, and the program's budget for `steps` steps of every env."""
        self._update()
        # After `finish`, what is granted would never be spent.
        if self._finished or self._grant(steps) < steps * self._config.envs_per_actor:
            # Without regard to what resets would save, so that the order of the workers does not matter. The
            # steps are made in `finish`, when the learner has published its last parameters.
            raise BudgetSpent(f"{self._name}: too few env steps are left for {steps} steps of every env.")

    def _spend_rest(self) -> None:
        self._dropped += self._close_adders(timeout=0.0)
        for half in self._halves:
            half.actor.adder = None
        while self._spent < self._granted or self._grant(1):
            self._step_envs()

    def _grant(self, steps: int) -> int:
        """Reports the steps made and asks for `steps` of every env; returns the number granted."""
        wanted = steps * self._config.envs_per_actor
        self._granted, self._spent = self._counter.grant(self._name, wanted, self._spent), 0
        return self._granted

    def _step_envs(self) -> None:
        if launch.stop_event().is_set():
            raise launch.ProgramStopped(f"{self._name}: the program stops.")
        super()._step_envs()


class GradientWorker(RolloutWorker):
    """A `RolloutWorker` that also computes the gradients of what it collects.

    ```python
    plan = Par(workers, GradientWorker.sample).map(GradientWorker.gradients).unordered().map(learner.apply)
    ```
    """

    _learner: SGDLearner
    _policy: core.Policy

    def gradients(self, sample: ReplaySample) -> Gradients:
        """The gradients of the agent's loss on a batch, with the parameters that collected it, in numpy."""
        self._learner.steps, self._learner.env_steps = self._policy.progress
        return as_numpy(self._learner.gradients(sample._replace(data=as_tensors(sample.data))))

    def _make_policy(self, setup: Setup, networks: Any) -> core.Policy:
        self._learner = setup.agent.make_learner(networks, setup.spec)  # type: ignore[assignment]
        self._policy = super()._make_policy(setup, networks)
        self._policy.variables = ()  # All of them, for the loss.
        return self._policy


def stack(samples: Sequence[ReplaySample]) -> ReplaySample:
    """Stacks batches along a new first axis, in their order."""
    return tree.map_structure(lambda *leaves: np.stack(leaves), *samples)


def concatenate(samples: Sequence[ReplaySample]) -> ReplaySample:
    """Joins batches of several workers along their first axis, in their order."""
    return tree.map_structure(lambda *leaves: np.concatenate(leaves), *samples)
