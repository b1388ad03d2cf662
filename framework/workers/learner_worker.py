"""The workers of the learner nodes, which drive learners with data from replay."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from framework.learners.group import FirstLearner, GroupMember, Place
from framework.learners.stall_detector import StallDetector
from framework.own_settings import seeded
from framework.variables import VariableBlock, Variables
from framework.workers.learner import ProgramLearner
from framework.workers.worker import (
    ProgramWorker,
    Setup,
    describe_tables,
    keep_freed_memory,
    prepare_process,
)

_LOG = logging.getLogger(__name__)


class LearnerNode(ProgramWorker):
    """A worker that steps a `ProgramLearner` and is the program's source of variables.

    A node may have several learners. Calls then name the one they are for; None is the first.

    Args: as `ProgramLearner`'s.
    """

    def __init__(self, setup: Setup, *, seed: int = 0, name: str = "learner", **options: Any):
        prepare_process(seed)
        keep_freed_memory()
        self._learner = ProgramLearner(setup, seed=seed, name=name, **options)
        self._learners = {name: self._learner}
        self._num_learners = setup.config.num_learners
        self._block = self._learner.published.block

    def variable_block(self, learner: str | None = None) -> VariableBlock:
        """The newest parameters. A client that cannot map this machine's shared memory gets None."""
        return self._of(learner).published.block

    def get_variables(
        self,
        names: Sequence[str] = (),
        newer_than: int = -1,
        timeout: float = 0.0,
        learner: str | None = None,
    ) -> Variables | None:
        """See `VariableBlock.get_variables`; for clients that cannot map the block."""
        return self._of(learner).published.block.get_variables(names, newer_than, timeout)

    def get_state(self, learner: str | None = None) -> dict[str, Any]:
        """See `ProgramLearner.get_state`."""
        return self._of(learner).get_state()

    def set_state(self, state: Mapping[str, Any], learner: str | None = None) -> None:
        """See `ProgramLearner.set_state`. It fails with a group of learners, which keep theirs equal."""
        if self._num_learners > 1:
            raise ValueError(f"set_state: got num_learners {self._num_learners}, expected 1.")
        self._of(learner).set_state(state)

    def _of(self, learner: str | None) -> ProgramLearner:
        return self._learner if learner is None else self._learners[learner]

    def close(self) -> None:
        """See `ProgramLearner.close`."""
        with contextlib.ExitStack() as stack:
            for learner in self._learners.values():
                stack.callback(learner.close)


class LearnerWorker(LearnerNode):
    """Drives a learner with batches from replay, one per `step()`.

    Args: as `ProgramLearner`'s.
    """

    def __init__(self, setup: Setup, *, replay: Any, **options: Any):
        super().__init__(setup, replay=replay, **options)
        config, on_policy = setup.config, setup.agent.max_policy_lag is not None
        assert self._learner.dataset is not None
        self._dataset = self._learner.dataset
        self._replay, self._waits_for_data = replay, False
        self._stall_detector = StallDetector(config.num_actors) if on_policy else None
        self._first: Any = None  # The `FirstLearner` of several.
        if config.num_learners > 1:
            self._first = FirstLearner(self._learner.learner, config.num_learners)
            self._member = GroupMember(self._learner.learner, 0, config.num_learners, self._first)
            self._learner.published.save_first()

    def wait_for_version(self, version: int, timeout: float, actor: str | None = None) -> bool:
        """Blocks until `version` or a newer one is published; False after `timeout` seconds.

        An actor that passes its name as `actor` has sent all its data. If all actors wait like this while the
        learner waits for data, some data was lost: the learner then publishes the same parameters again, so
        that the actors collect new data.
        """
        block = self._block
        with block.changed:
            if block.changed.wait_for(lambda: block.version >= version, timeout):
                return True
            if actor is None or self._stall_detector is None or not self._waits_for_data:
                return False
            if not self._stall_detector.asked(actor, block.version):
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
        with self._block.changed:
            return not self._waits_for_data

    def join_learners(self, rank: int, place: Place, call_id: str) -> tuple[int, bool, dict[str, Any]] | None:
        """For the other learners: see `FirstLearner.join_learners`."""
        return self._first.join_learners(rank, place, call_id)

    def arrive(self, rank: int, number: int, step: int) -> int | None:
        """For the other learners: see `FirstLearner.arrive`."""
        return self._first.arrive(rank, number, step)

    def exchange(self, number: int, operation: str, *arguments: Any) -> Any:
        """For the other learners: see `FirstLearner.exchange`."""
        return self._first.exchange(number, operation, *arguments)

    def ready(self) -> bool:
        return self._learner.finished() or self._dataset.ready()

    def why_not_ready(self) -> str:
        """The text that the serial engine prints in a deadlock."""
        return f"its dataset waits for a batch: {describe_tables(self._replay)}"

    def step(self) -> None:
        learner = self._learner
        if learner.finished():  # It was restored without steps left.
            learner.end_program("max_learner_steps")
            self._finish()
            return
        started = time.perf_counter()
        self._waits_for_data = True
        sample = next(self._dataset, None)
        learner.report.waited_s += time.perf_counter() - started
        if sample is None or (self._first is not None and self._member.go_on() is None):
            self._finished = True  # The program is being stopped.
            return
        with self._block.changed:
            self._waits_for_data = False
        try:
            learner.step(sample)
        except RuntimeError as error:
            if self._first is None or not self._member.has_lost(error):
                raise
            learner.go_back(error)
            return
        if self._first is not None:
            self._member.stepped()
        if learner.finished():
            self._finish()

    def _finish(self) -> None:
        self._finished = True
        if self._first is not None:
            self._first.close()

    def close(self) -> None:
        if self._first is not None:
            self._first.close()
            self._member.leave()
        super().close()


class LearnerReplica(ProgramWorker):
    """A learner of rank 1 or higher. It learns from its shard of each batch and does not publish.

    Args:
      setup: makes the networks, the dataset and the learner.
      replay: the replay client to sample from and to write priorities to.
      first: a client of the learner of rank 0.
      rank: rank of this learner, from 1.
      clients: the agent's `clients`.
      seed: seed of this worker.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        replay: Any,
        first: FirstLearner,
        rank: int,
        clients: Mapping[str, Any] | None = None,
        seed: int = 0,
    ):
        prepare_process(seed)
        size = setup.config.num_learners
        agent = setup.agent.for_program(setup.config.num_envs, size, rank).for_learner(clients)
        with seeded(seed):
            self._learner = agent.make_learner(agent.make_networks(setup.spec), setup.spec)
        if setup.config.learner_threads is not None:
            torch.set_num_threads(setup.config.learner_threads)
        self._dataset = agent.make_dataset(replay)
        self._member = GroupMember(self._learner, rank, size, first)

    def step(self) -> None:
        sample = next(self._dataset, None)
        env_steps = None if sample is None else self._member.go_on()
        if sample is None or env_steps is None:
            self._finished = True
            return
        self._learner.env_steps = env_steps
        try:
            result = self._learner.step(sample)
        except RuntimeError as error:
            if not self._member.has_lost(error):
                raise
            return
        self._member.stepped()
        if result.priorities is not None:
            self._dataset.update_priorities(sample.info.key, result.priorities)

    def close(self) -> None:
        """Leaves the group and returns prefetched samples to replay."""
        self._member.leave()
        self._dataset.close()
