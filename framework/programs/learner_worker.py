"""A learner in a program, and the worker of the learner node, which drives it with data from replay."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import numpy as np
import torch

import launch
from framework.programs.learner_group import FirstLearner, GroupMember, Place
from framework.programs.limiter_state import describe_tables
from framework.programs.roster import Roster, StallDetector
from framework.programs.run_folder import RunError, changed_settings
from framework.programs.worker import (
    ProgramWorker,
    Setup,
    is_elastic,
    learner_threads,
    prepare_process,
    seeded,
)
from framework.replay import ReplaySample, TableInfo
from framework.replay.errors import DeadlineExceededError, ServerClosed
from framework.types import StepResult
from framework.variables import VariableBlock, Variables, shared_path
from launch import platforms

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # Of malloc.h.
_WAIT_S = 0.5  # For the data of all actors that are there, between two checks for a stop of the program.
_TAKE_S = 5.0  # For items that replay has said to have: a server that was restarted may have fewer.
_LOG = logging.getLogger(__name__)


class ProgramLearner:
    """An agent's learner in a program: it counts its steps, and publishes, logs and saves when due.

    The version of the parameters is the number of learner steps in this run, including steps that a killed
    learner made after its last checkpoint.

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
      block: the published parameters.
      published: notified at each new version.
      waited_s: seconds waited for data since the last row. The caller adds to it.
      num_actors: number of actors whose data the last batch has, with `min_actors`; None otherwise.
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
        agent, config = setup.agent.for_learner(clients), setup.config
        self._agent, self._config, self._replay = agent, config, replay
        self._name, self._steps_name = name, f"{name}_steps"
        self._counter, self._monitor, self._checkpointer = counter, monitor, checkpointer
        with seeded(seed):
            self.learner = agent.make_learner(agent.make_networks(setup.spec), setup.spec)
        sizes = [tensor.numel() for of in self.learner.parameters().values() for tensor in of.values()]
        self._threads = learner_threads(config, sum(sizes))
        self._learns = bool(sizes)  # An agent without parameters, which acts at random, has none to learn.
        self.dataset = None if replay is None else agent.make_dataset(replay)
        # Actors with a limited policy lag need every version.
        self._is_on_policy = agent.max_policy_lag is not None
        self._publish_period = 1 if self._is_on_policy else config.publish_period
        self._steps = 0
        self._uncounted = 0
        self._has_ended = False
        self.num_actors: int | None = None
        self._metrics: Mapping[str, SupportsFloat] | None = None  # Of the last step.
        self.published = threading.Condition()
        self.block = VariableBlock(self.learner.parameters(), shared_path())
        self._restore()
        self.publish()

    @property
    def finished(self) -> bool:
        """Whether all of `max_learner_steps` are made, which an exact resume may change."""
        limit = self._config.max_learner_steps
        return limit is not None and self._steps >= limit

    def step(self, sample: ReplaySample) -> StepResult:
        """One learner step on a batch of the learner's device. Writes priorities back to replay."""
        self._set_threads()
        result = self.learner.step(sample)
        if result.priorities is not None and self.dataset is not None:
            self.dataset.update_priorities(sample.info.key, result.priorities)
        self._times_sampled += float(np.mean(np.asarray(sample.info.times_sampled)))
        self._count(result.metrics)
        return result

    def publish(self) -> dict[str, int]:
        """Counts the steps, then publishes, so that the steps of a published version are always counted."""
        counts: dict[str, int] = self._counter.increment(**{self._steps_name: self._uncounted})
        self._uncounted = 0
        self.learner.env_steps = counts.get("env_steps", 0)
        with self.published:
            if self.block.version < self._steps:
                self.block.publish(self._steps, self.learner.parameters(), self.learner.env_steps)
            self.published.notify_all()
        return counts

    def publish_again(self) -> None:
        """Publishes the same parameters as a new version."""
        self._steps += 1
        self._uncounted += 1
        self.publish()

    def close(self) -> None:
        """Logs and counts the last steps, saves the state, and returns prefetched samples to replay.

        A run that spent its env steps without a single learner step fails with a `RunError`.
        """
        if self._learns and not self._steps and self._counter.remaining() == 0:
            launch.stop(RunError(self._why_nothing_was_learned()))
        if self._metrics is not None and self._steps > self._logged[0]:
            self._log(self._metrics)
        self._counter.increment(**{self._steps_name: self._uncounted})
        if self._checkpointer is not None:
            self._checkpointer.put(self._name, self.save())
        if self.dataset is not None:
            self.dataset.close()

    def _why_nothing_was_learned(self) -> str:
        tables: Mapping[str, TableInfo] = {}
        if self._replay is not None:
            with contextlib.suppress(DeadlineExceededError, ServerClosed):
                tables = self._replay.server_info(timeout=5)
        states = [
            f"; table {name!r} holds {info.current_size:,} items and is sampled from "
            f"{info.rate_limiter_info.min_size_to_sample:,} on"
            for name, info in tables.items()
        ]
        return (
            f"{self._name}: made no step in {self._config.max_env_steps:,} env steps{''.join(states)}. "
            "Nothing was learned. Give the run more env steps, or the agent a smaller batch, unroll, or "
            "min_replay_size."
        )

    def end_if_finished(self) -> bool:
        """Ends the program, once, if all of `max_learner_steps` are made; returns whether they are."""
        if self.finished and not self._has_ended:
            self._has_ended = True
            self._monitor.finish("max_learner_steps", {self._steps_name: self._steps})
        return self.finished

    def save(self) -> dict[str, Any]:
        return {"learner": self.learner.save(), "steps": self._steps}

    def keep_first_state(self) -> None:
        """Saves the state if none is saved, so that `go_back` has one."""
        if self._checkpointer is not None and self._checkpointer.get(self._name) is None:
            self._checkpointer.put(self._name, self.save())

    def go_back(self, error: RuntimeError) -> None:
        """Continues from the last saved state after `error` in the middle of a step, with newer versions."""
        if self._checkpointer is None:
            raise RuntimeError(
                "num_learners: lost another learner in the middle of a step, and the run has no directory "
                "with a checkpoint to go on from. Give it a directory."
            ) from error
        _LOG.warning("Lost another learner in step %d, going on from the last saved state.", self._steps)
        self._restore()
        self.publish()

    def _set_threads(self) -> None:
        if torch.get_num_threads() != self._threads:  # On serial, nodes that were made later have set it.
            torch.set_num_threads(self._threads)

    def _count(self, metrics: Mapping[str, SupportsFloat]) -> None:
        """Counts a step, and publishes, logs and saves if that is due."""
        self._metrics = metrics
        self._steps += 1
        self._uncounted += 1
        if self.finished or self._steps % self._publish_period == 0:
            counts = self.publish()
            if self._checkpointer is not None:
                self._checkpoint_if_due(counts)
        if self.finished or self._steps % self._config.learner_log_period == 0:
            self._log(metrics)
        self.end_if_finished()

    def _restore(self) -> None:
        state = self._checkpointer.get(self._name) if self._checkpointer is not None else None
        if state is not None:
            try:
                self.learner.restore(state["learner"])
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                directory = str(self._config.directory)
                changed = changed_settings(directory, self._agent)
                changed = changed or "its settings are equal, so its code has changed"
                raise ValueError(
                    f"agent: got one that does not fit the checkpoint of the run in {directory}: {changed}. "
                    "Restore the agent, or give the new run another directory."
                ) from error
            self._steps = int(state["steps"])
        counts = self._counter.get_counts()
        made, env_steps = counts.get(self._steps_name, 0), counts.get("env_steps", 0)
        if state is None and made:
            _LOG.warning(
                "%s: its %d steps before were not saved. It begins with new parameters.", self._name, made
            )
        # A learner that restarts from an older checkpoint, or from none, continues with versions above those
        # of the actors. Version 0, which tells policies that no step was made, stays, unless actors wait for
        # the next version.
        if made > self._steps:
            self._steps = made + 1
        if self.block.version >= (0 if self._is_on_policy else 1):
            self._steps = max(self._steps, self.block.version + 1)
        self._uncounted = self._steps - made
        self.learner.env_steps = env_steps
        # Env steps and time of the last checkpoint; steps, env steps and time of the last row.
        self._checkpointed = (0 if state is None else env_steps, time.monotonic())
        self._logged = (self._steps, env_steps, time.perf_counter())
        self.waited_s = self._times_sampled = 0.0  # Since then.

    def _checkpoint_if_due(self, counts: dict[str, int]) -> None:
        period, minutes = self._config.checkpoint_period, self._config.checkpoint_minutes
        made, now = counts.get("env_steps", 0), time.monotonic()
        since = made - self._checkpointed[0], now - self._checkpointed[1]
        if (period is not None and since[0] >= period) or (minutes is not None and since[1] >= 60 * minutes):
            self._checkpointed = (made, now)
            self._checkpointer.put(self._name, self.save())
            self._checkpointer.commit("periodic", self._name)

    def _log(self, metrics: Mapping[str, SupportsFloat]) -> None:
        steps, env_steps, now = self._steps, self.learner.env_steps, time.perf_counter()
        made, seconds = steps - self._logged[0], max(now - self._logged[2], 1e-9)
        row: dict[str, Any] = {"steps": steps, "version": self.block.version, "env_steps": env_steps}
        row.update({name: float(value) for name, value in metrics.items()})
        if self.num_actors is not None:
            row["actors"] = self.num_actors
        row["time/learner_steps_per_s"] = made / seconds
        row["time/env_steps_per_s"] = (env_steps - self._logged[1]) / seconds
        row["time/waited_for_data_fraction"] = self.waited_s / seconds
        if self._replay is not None:
            row["times_sampled"] = self._times_sampled / made
            try:
                row.update(replay_numbers(self._replay.server_info(timeout=5)))
            except (DeadlineExceededError, ServerClosed) as error:  # It is busy, or being restarted.
                _LOG.warning("%s: a row without the numbers of replay: %s", self._name, error)
        self._logged = (steps, env_steps, now)
        self.waited_s = self._times_sampled = 0.0
        self._monitor.write(self._name, row)


class LearnerNode(ProgramWorker):
    """A worker that steps a `ProgramLearner` and is the program's source of variables.

    Args: as those of `ProgramLearner`.
    """

    _learner_class: type[ProgramLearner] = ProgramLearner

    def __init__(self, setup: Setup, *, seed: int = 0, **options: Any):
        prepare_process(seed)
        keep_freed_memory()
        self._learner = self._learner_class(setup, seed=seed, **options)

    def variable_block(self) -> VariableBlock:
        """The newest parameters. A client that cannot map this machine's shared memory gets None."""
        return self._learner.block

    def get_variables(
        self, names: Sequence[str] = (), newer_than: int = -1, timeout: float = 0.0
    ) -> Variables | None:
        """See `VariableBlock.get_variables`; for clients that cannot map the block.

        Waits up to `timeout` seconds for a version that is newer.
        """
        block, published = self._learner.block, self._learner.published
        if timeout > 0:
            with published:
                published.wait_for(lambda: block.version > newer_than, timeout)
        return block.get_variables(names, newer_than)

    def close(self) -> None:
        """See `ProgramLearner.close`."""
        self._learner.close()


class LearnerWorker(LearnerNode):
    """Drives a learner with batches from replay, one per `step()`.

    Args: as those of `ProgramLearner`.
    """

    def __init__(self, setup: Setup, *, replay: Any, **options: Any):
        super().__init__(setup, replay=replay, **options)
        config, on_policy = setup.config, setup.agent.max_policy_lag is not None
        self._replay, self._waits_for_data = replay, False
        self._roster: Roster | None = None
        if on_policy and is_elastic(config) and config.min_actors is not None:
            self._roster = Roster(config.min_actors)
            launch.register_loss_handler(self._lose)
        self._collecting = True  # Whether an actor that joins contributes to the next batch.
        detects = on_policy and self._roster is None
        self._stall_detector = StallDetector(config.num_actors) if detects else None
        self._stalled_version = -1  # The newest that the stall detector knows.
        self._first: FirstLearner | None = None
        if config.num_learners > 1:
            self._first = FirstLearner(self._learner.learner, config.num_learners)
            self._member = GroupMember(self._learner.learner, 0, config.num_learners, self._first)
            self._learner.keep_first_state()

    def join(self, actor: str, life: str) -> int:
        """Makes batches from the data of `actor` too, with `min_actors`; returns its first version."""
        assert self._roster is not None
        with self._learner.published:
            version = self._learner.block.version + (not self._collecting)
            self._roster.join(actor, version, life)
            return version

    def _lose(self, actor: str) -> None:
        """Does not wait for `actor` any more, if it has joined."""
        assert self._roster is not None
        with self._learner.published:
            self._roster.lose(actor)
            self._learner.published.notify_all()

    def wait_for_version(
        self,
        version: int,
        timeout: float,
        actor: str | None = None,
        reported: int | None = None,
        life: str = "",
    ) -> bool:
        """Blocks until `version` or a newer one is published; False after `timeout` seconds.

        An actor that passes its name as `actor` has sent all its data. If all actors wait like this while the
        learner waits for data, some data was lost: the learner then publishes the same parameters again, so
        that the actors collect new data. With `min_actors`, it says instead that its unrolls for the versions
        before `reported` are in replay, and `life` is its life; see `Roster`.
        """
        published, block = self._learner.published, self._learner.block
        with published:
            if self._roster is not None and actor is not None and reported is not None:
                self._roster.report(actor, reported, life)
                published.notify_all()
            if published.wait_for(lambda: block.version >= version, timeout):
                return True
            if actor is None or self._stall_detector is None or not self._waits_for_data:
                return False
            if block.version > self._stalled_version:
                self._stalled_version = block.version
                self._stall_detector.moved()
            if not self._stall_detector.asked(actor):
                return False
            _LOG.warning(
                "All actors wait for version %d of the parameters and the learner waits for their data: some "
                "data was lost, probably because the replay server or the learner was restarted. The "
                "parameters of version %d are published again.",
                version,
                block.version,
            )
            self._learner.publish_again()
            return block.version >= version

    def is_learning(self) -> bool:
        """Whether a step is running. Between two steps, the learner waits for data."""
        with self._learner.published:
            return not self._waits_for_data

    def join_learners(self, rank: int, place: Place, call_id: str) -> tuple[int, bool, dict[str, Any]] | None:
        """For the other learners: see `FirstLearner.join_learners`."""
        assert self._first is not None
        return self._first.join_learners(rank, place, call_id)

    def arrive(self, rank: int, number: int, step: int) -> int | None:
        """For the other learners: see `FirstLearner.arrive`."""
        assert self._first is not None
        return self._first.arrive(rank, number, step)

    def exchange(self, number: int, operation: str, *arguments: Any) -> Any:
        """For the other learners: see `FirstLearner.exchange`."""
        assert self._first is not None
        return self._first.exchange(number, operation, *arguments)

    def ready(self) -> bool:
        assert self._learner.dataset is not None
        return not self._finished and (self._learner.finished or self._learner.dataset.ready())

    def why_not_ready(self) -> str:
        """The text that the serial engine prints in a deadlock."""
        return f"its dataset waits for a batch: {describe_tables(self._replay)}"

    def step(self) -> None:
        learner = self._learner
        assert learner.dataset is not None
        if learner.end_if_finished():  # It was restored without steps left.
            self._finish()
            return
        started = time.perf_counter()
        self._waits_for_data = True
        sample = next(learner.dataset, None) if self._roster is None else self._take(self._roster)
        learner.waited_s += time.perf_counter() - started
        if sample is None or not (self._first is None or self._member.go_on() is not None):
            self._finished = True  # The program is being stopped.
            return
        with learner.published:
            self._waits_for_data = False
        try:
            learner.step(sample)
        except RuntimeError as error:
            if self._first is None or not self._member.has_lost(error):
                raise
            learner.go_back(error)
            return
        finally:
            with learner.published:
                self._collecting = True
        if self._first is not None:
            self._member.stepped()
        if learner.finished:
            self._finish()

    def _finish(self) -> None:
        self._finished = True
        if self._first is not None:
            self._first.close()

    def _take(self, roster: Roster) -> Any:
        """The next batch, with the unrolls of all actors that are there; None when the program stops."""
        learner, stopped = self._learner, launch.stop_event()
        assert learner.dataset is not None
        while not stopped.is_set():
            with learner.published:
                if not learner.published.wait_for(lambda: roster.is_complete(learner.block.version), _WAIT_S):
                    continue
                self._collecting, learner.num_actors = False, len(roster)
            n = learner.dataset.num_items()
            if n and (sample := learner.dataset.take(n, _TAKE_S)) is not None:
                return sample
            if not n:  # They were lost, with a replay server or a learner.
                learner.publish_again()
            self._collecting = True
        return None

    def close(self) -> None:
        if self._first is not None:
            self._first.close()
            self._member.leave()
        super().close()


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


def keep_freed_memory() -> None:
    """Keeps freed blocks of memory of up to 32 MB in this process, instead of returning them to the system.

    A learner on the CPU allocates the same large arrays at each step. By default each is mapped again, and
    clearing its pages took a fifth of a step with images. Only for glibc; has no effect elsewhere.
    """
    if not platforms.has("mallopt"):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # The largest value that it accepts.
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, 64 << 20)
