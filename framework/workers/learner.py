"""A learner in a program: it counts its steps, and publishes, logs and saves when that is due."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

import numpy as np

import launch
from framework import core
from framework.own_settings import OwnSettings, seeded
from framework.replay import ReplaySample, TableInfo
from framework.replay.errors import DeadlineExceededError, ServerClosed
from framework.runs import initial
from framework.runs.run_folder import RunError, changed_settings
from framework.runs.stopwatch import Stopwatch
from framework.types import Gradients, StepResult
from framework.variables import VariableBlock, shared_path
from framework.workers.worker import Setup, describe_tables

_LOG = logging.getLogger(__name__)


class Published:
    """The parameters of a learner, as the program has them: the newest, and the saved ones.

    Their version is the number of learner steps in this run. Steps that a killed learner made after its last
    checkpoint count, too.

    Args:
      name: name of the learner's part of a checkpoint. The count of its steps is `NAME_steps`.
      setup: has the agent and the settings of the program.
      learner: has the parameters.
      counter: counts the steps.
      checkpointer: keeps the saved states. None keeps nothing.

    Attributes:
      block: the newest parameters.
      steps: number of steps, which the next version has. The caller adds to it.
      clock: the program's.
    """

    def __init__(self, name: str, setup: Setup, learner: core.Learner, counter: Any, checkpointer: Any):
        self._name, self._setup, self._learner = name, setup, learner
        self._counter, self._checkpointer, self.clock = counter, checkpointer, setup.clock
        path = shared_path()  # The node may have several learners.
        self.block = VariableBlock(learner.parameters(), path and f"{path}-{name}")
        self.steps = self._counted = 0  # Made, and of those the ones that the counter knows.
        self._committed = (0, Stopwatch())  # Step at the last checkpoint, and time since then.
        self._restore()

    def report(self) -> dict[str, int]:
        """Tells the counter of the steps; returns all counts."""
        name = f"{self._name}_steps"
        counts: dict[str, int] = self._counter.increment(**{name: self.steps - self._counted})
        self._counted = counts[name]  # Fewer than were told, if the counter has been restarted.
        return counts

    def publish(self) -> dict[str, int]:
        """Counts the steps, then publishes, so that the steps of a published version are always counted.

        Where the clock counts learner steps, it publishes first: who waits for a step takes its parameters.
        """
        counts = self.report() if self.clock.acts else None
        self._learner.env_steps = self.steps if counts is None else self.clock.now(counts)
        with self.block.changed:
            if self.block.version < self.steps:
                self.block.publish(self.steps, self._learner.parameters(), self._learner.env_steps)
        return self.report() if counts is None else counts

    def state(self) -> dict[str, Any]:
        """The state now."""
        return {"learner": self._learner.save(), "steps": self.steps}

    def save(self) -> None:
        """Saves the state."""
        if self._checkpointer is not None:
            self._checkpointer.put(self._name, self.state())

    def save_first(self) -> None:
        """Saves the state if none is saved, so that `go_back` has one."""
        if self._checkpointer is not None and self._checkpointer.get(self._name) is None:
            self.save()

    def commit_if_due(self) -> None:
        """Saves the state and writes a checkpoint, if one is due since the last `publish`."""
        if self._checkpointer is None:
            return
        now = self._learner.env_steps
        period, minutes = self._setup.config.checkpoint_period, self._setup.config.checkpoint_minutes
        made, passed = now - self._committed[0], self._committed[1].seconds()
        if (period is not None and made >= period) or (minutes is not None and passed >= 60 * minutes):
            self._committed = (now, Stopwatch())
            self.save()
            self._checkpointer.commit("periodic", self._name)

    def go_back(self, error: RuntimeError) -> None:
        """Goes on from the newest saved state after `error` in the middle of a step, with newer versions."""
        if self._checkpointer is None:
            raise RuntimeError(
                "num_learners: lost another learner in the middle of a step, and the run has no directory "
                "with a checkpoint to go on from. Give it a directory."
            ) from error
        _LOG.warning("Lost another learner in step %d, going on from the last saved state.", self.steps)
        self._restore()

    def _restore(self) -> None:
        """Goes on from the newest saved state, if there is one, with newer versions than any known one."""
        state = self._checkpointer.get(self._name) if self._checkpointer is not None else None
        if state is not None:
            try:
                self._learner.restore(state["learner"])
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                directory = str(self._setup.config.directory)
                changed = changed_settings(directory, self._setup.agent)
                changed = changed or "its settings are equal, so its code has changed"
                raise ValueError(
                    f"agent: got one that does not fit the checkpoint of the run in {directory}: {changed}. "
                    "Restore the agent, or give the new run another directory."
                ) from error
        counts = self._counter.get_counts()
        made: int = counts.get(f"{self._name}_steps", 0)
        self._learner.env_steps = self.clock.now(counts)
        # A learner that restarts from an older checkpoint, or from none, continues with versions above those
        # of the actors.
        steps = 0 if state is None else int(state["steps"])
        self.steps = made + 1 if made > steps else steps
        # Version 0, which tells policies that no step was made, stays, unless actors wait for the next one.
        if self.block.version >= (0 if self._setup.agent.max_policy_lag is not None else 1):
            self.steps = max(self.steps, self.block.version + 1)
        self._counted = made
        if state is None and made:
            _LOG.warning(
                "%s: its %d steps before were not saved. It begins with new parameters.", self._name, made
            )
        self._committed = (0 if state is None else self._learner.env_steps, Stopwatch())


class LearnerReport:
    """The rows of metrics of a learner.

    Args:
      name: label of the rows.
      learner: knows the env steps.
      published: knows the learner steps and the version.
      monitor: takes the rows.
      replay: the replay client, whose numbers join the rows. None without one.

    Attributes:
      metrics: the last step's, which the caller sets. None before the first.
      times_sampled: how often items were sampled, per batch, since the last row. The caller adds to it.
      waited_s: seconds waited for data since the last row. The caller adds to it.
    """

    def __init__(self, name: str, learner: core.Learner, published: Published, monitor: Any, replay: Any):
        self._name, self._learner, self._published = name, learner, published
        self._monitor, self._replay = monitor, replay
        self.metrics: Mapping[str, SupportsFloat] | None = None
        self.begin()

    def begin(self) -> None:
        """Later rows are about what happens from now on."""
        # Steps and env steps in the last row, and time since then.
        self._logged = (self._published.steps, self._learner.env_steps, Stopwatch())
        self.waited_s = self.times_sampled = 0.0

    def log(self) -> None:
        """Writes a row, if a step was made since the last one."""
        steps, env_steps = self._published.steps, self._learner.env_steps
        made, seconds = steps - self._logged[0], max(self._logged[2].seconds(), 1e-9)
        if self.metrics is None or not made:
            return
        row: dict[str, Any] = {"steps": steps, "version": self._published.block.version}
        acts = self._published.clock.acts
        if acts:
            row["env_steps"] = env_steps
        row.update({name: float(value) for name, value in self.metrics.items()})
        row["time/learner_steps_per_s"] = made / seconds
        if acts:
            row["time/env_steps_per_s"] = (env_steps - self._logged[1]) / seconds
        row["time/waited_for_data_fraction"] = self.waited_s / seconds
        if self._replay is not None:
            row["times_sampled"] = self.times_sampled / made
            try:
                row.update(replay_numbers(self._replay.server_info(timeout=5)))
            except (DeadlineExceededError, ServerClosed) as error:  # It is busy, or being restarted.
                _LOG.warning("%s: a row without the numbers of replay: %s", self._name, error)
        self.begin()
        self._monitor.write(self._name, row)

    def why_nothing_was_learned(self, max_env_steps: int | None) -> str:
        """The text of the error of a run whose env steps are spent before the first learner step."""
        tables = ""
        if self._replay is not None:
            with contextlib.suppress(DeadlineExceededError, ServerClosed):
                tables = f"; {describe_tables(self._replay)}"
        return (
            f"{self._name}: made no step in {max_env_steps:,} env steps{tables}. Nothing was learned. "
            "Give the run more env steps, or the agent a smaller batch, unroll, or min_replay_size."
        )


class ProgramLearner:
    """An agent's learner in a program: it counts its steps, and publishes, logs and saves when due.

    Args:
      setup: makes the networks, the dataset and the learner.
      replay: the replay client to sample from and to write priorities to. None for batches that come from
        elsewhere.
      counter: counts the steps, as `NAME_steps`.
      monitor: takes the rows of metrics.
      checkpointer: keeps the learner's state, which the constructor restores. None keeps nothing.
      name: label of its rows and name of its part of a checkpoint.
      clients: the agent's `clients`.
      seed: seed of the initial parameters.

    Attributes:
      learner: the agent's learner.
      dataset: the agent's batches from `replay`; None without it.
      published: the published and the saved parameters.
      report: the rows of metrics.
      stepping: held during a step. Reentrant: a step publishes while it holds the lock.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        replay: Any = None,
        counter: Any,
        monitor: Any,
        checkpointer: Any = None,
        name: str = "learner",
        clients: Mapping[str, Any] | None = None,
        seed: int = 0,
    ):
        agent, self._config = setup.agent.for_learner(clients), setup.config
        self._counter, self._monitor, self._steps_name = counter, monitor, f"{name}_steps"
        self.stepping = threading.RLock()
        # The last step is evaluated where the clock counts learner steps.
        self._are_evaluated = bool(setup.evaluators) and not setup.clock.acts
        with seeded(seed):
            networks = agent.make_networks(setup.spec)
            is_new = checkpointer is None or checkpointer.get(name) is None
            if is_new and self._config.init is not None:
                initial.load(self._config.init, networks, name)
            self.learner = agent.make_learner(networks, setup.spec)
        tensors = itertools.chain(*(each.values() for each in self.learner.parameters().values()))
        self._settings = OwnSettings(tensors, self._config.learner_threads)
        self.dataset = None if replay is None else agent.make_dataset(replay)
        # Actors with a limited policy lag need every version.
        self._publish_period = 1 if agent.max_policy_lag is not None else self._config.publish_period
        self.published = Published(name, setup, self.learner, counter, checkpointer)
        self.report = LearnerReport(name, self.learner, self.published, monitor, replay)
        self.published.publish()

    def finished(self) -> bool:
        """Whether all of `max_learner_steps` are made, which an exact resume may change."""
        limit = self._config.max_learner_steps
        return limit is not None and self.published.steps >= limit

    def step(self, sample: ReplaySample) -> StepResult:
        """One learner step on a batch of the learner's device. Writes priorities back to replay."""
        self.report.times_sampled += float(np.mean(np.asarray(sample.info.times_sampled)))
        return self._learn(self.learner.step, sample)

    def apply(self, gradients: Gradients) -> StepResult:
        """One optimizer step with the gradients of another process."""
        # Workers know the version, which is ahead of the learner's own steps after its restart.
        age = self.published.steps - gradients.learner_steps
        return self._learn(self.learner.apply, gradients, gradient_age=age)

    def _learn(self, step: Callable[..., StepResult], batch: Any, **metrics: SupportsFloat) -> StepResult:
        """Makes a step and counts it, and publishes, logs, saves and ends the program if that is due."""
        with self.stepping:
            return self._step(step, batch, metrics)

    def _step(self, step: Callable[..., StepResult], batch: Any, metrics: Mapping[str, Any]) -> StepResult:
        with self._settings:
            result = step(batch)
        if result.priorities is not None and self.dataset is not None:
            self.dataset.update_priorities(batch.info.key, result.priorities)
        if metrics:
            result = result._replace(metrics={**result.metrics, **metrics})
        self.report.metrics = result.metrics
        self.published.steps += 1
        steps, finished = self.published.steps, self.finished()
        if finished or steps % self._publish_period == 0:
            self.published.publish()
            self.published.commit_if_due()
        if finished or steps % self._config.learner_log_period == 0:
            self.report.log()
        if finished:
            self.end_program("max_learner_steps")
        return result

    def publish_again(self) -> None:
        """Publishes the same parameters as a new version."""
        with self.stepping:
            self.published.steps += 1
            self.published.publish()

    def get_state(self) -> dict[str, Any]:
        """The learner's whole state between two steps: parameters, optimizers, targets, random numbers."""
        with self.stepping:
            return self.learner.save()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues with a state of `get_state`, also of a learner in another program with equal networks.

        The parameters are published at once, as a new version: versions go on from this learner's, and
        schedules from this program's env steps. If the state does not fit, the error leaves the learner as it
        was.
        """
        with self.stepping:
            before = self.learner.save()
            try:
                self.learner.restore(state)
            except BaseException:
                self.learner.restore(before)
                raise
            self.publish_again()
            self.published.save()

    def go_back(self, error: RuntimeError) -> None:
        """Continues from the last saved state after `error` in the middle of a step, with newer versions."""
        self.published.go_back(error)
        self.report.begin()
        self.published.publish()

    def close(self) -> None:
        """Counts the last steps, saves the state, logs, and returns prefetched samples to replay.

        A run that spent its env steps without a single learner step fails with a `RunError`.
        """
        with contextlib.ExitStack() as stack:  # A row that cannot be written must not cost the state.
            if self.dataset is not None:
                stack.callback(self.dataset.close)
            stack.callback(self.report.log)
            # An agent without parameters, which acts at random, has nothing to learn.
            learns = any(self.learner.parameters().values())
            if learns and not self.published.steps and self._counter.remaining() == 0:
                launch.stop(RunError(self.report.why_nothing_was_learned(self._config.max_env_steps)))
            self.published.report()
            self.published.save()

    def end_program(self, reason: str) -> None:
        """Publishes the last steps, and ends the program, unless that is the part of its evaluators."""
        self.published.publish()
        if reason == "max_learner_steps" and self._are_evaluated:
            return
        self._monitor.finish(reason, {self._steps_name: self.published.steps})


def replay_numbers(info: Mapping[str, TableInfo]) -> dict[str, Any]:
    """Counters of each table of a `server_info`, since the start of the server.

    They are `size`, `inserted`, `sampled`, `samples_per_insert`, `sample_age` (mean number of items inserted
    between the insert of an item and its sampling) and `time/…_blocked_s` (seconds that inserts and samples
    waited for the rate limiter). A back end without the last two reports zeros for them.
    """
    numbers: dict[str, Any] = {}
    for name, table in info.items():
        prefix = "replay" if len(info) == 1 else f"replay/{name}"
        inserts, samples = table.rate_limiter_info.insert_stats, table.rate_limiter_info.sample_stats
        numbers[f"{prefix}/size"] = table.current_size
        numbers[f"{prefix}/inserted"] = inserts.completed
        numbers[f"{prefix}/sampled"] = samples.completed
        numbers[f"{prefix}/samples_per_insert"] = samples.completed / max(inserts.completed, 1)
        numbers[f"{prefix}/sample_age"] = table.sampled_age / max(samples.completed, 1)
        numbers[f"time/{prefix}/insert_blocked_s"] = inserts.blocked_ms / 1000
        numbers[f"time/{prefix}/sample_blocked_s"] = samples.blocked_ms / 1000
    return numbers
