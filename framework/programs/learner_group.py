"""Several learner nodes that make every step together: their barrier, and the learners beside the first."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

import launch
from framework.learners import LearnerGroup, distributed
from framework.programs.worker import ProgramWorker, Setup, prepare_process


class Barrier:
    """The point where `size` learners wait for each other before each step.

    A learner that waits for the gradient of another cannot be stopped. Each learner therefore waits here
    first, when it has its data: either all of them make the step or none does.
    """

    def __init__(self, size: int):
        self._size = size
        self._changed = threading.Condition()
        self._arrived: set[int] = set()  # ranks
        self._round = 0
        self._closed = False

    def arrive(self, rank: int) -> bool:
        """Waits for the others; True when all ranks have arrived, False once the barrier is closed.

        A learner that was restarted while it waited arrives again, and counts once.
        """
        with self._changed:
            if self._closed:
                return False
            mine = self._round
            self._arrived.add(rank)
            if len(self._arrived) == self._size:
                self._arrived.clear()
                self._round += 1
                self._changed.notify_all()
                return True
            self._changed.wait_for(lambda: self._round > mine or self._closed)
            return self._round > mine

    @property
    def started(self) -> bool:
        """Whether the learners have begun a step."""
        return self._round > 0

    def close(self) -> None:
        """Ends all current and future waits with False."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class FirstLearner:
    """The group's store and barrier, which the learner of rank 0 keeps for the others.

    Args:
      learner: the learner whose state the others start from.
      size: number of learners.
    """

    def __init__(self, learner: Any, size: int):
        engine = launch.get_node_context().engine
        if engine in ("serial", "threads"):
            raise ValueError(
                f"num_learners: got {size} on engine {engine!r}, which has one process for all nodes, "
                "expected 1. Use engine 'processes'."
            )
        self._learner, self._size = learner, size
        self._store = distributed.host_store(size)
        self._group: LearnerGroup | None = None
        self.barrier = Barrier(size)
        launch.register_stop_handler(self.barrier.close)

    def meeting(self, label: str, host: str) -> tuple[int, dict[str, Any]]:
        """`(port of the store, initial state)` for the learner of the node `label`, which joins.

        Raises:
          ValueError: The learner is on another host. It could not reach the store.
        """
        here = launch.get_node_context()
        if host != here.host:
            raise ValueError(
                f"num_learners: got learners on the hosts {here.host!r} ({here.label}) and {host!r} "
                f"({label}), expected one host. Give the group 'learner' the strategy STRICT_PACK, or use "
                "one learner."
            )
        if self.barrier.started:
            raise RuntimeError(
                "One of several learners was restarted after the first step. It cannot rejoin the others. "
                "Resume the run instead."
            )
        return self._store.port, self._learner.save()

    def go_on(self) -> bool:
        """Waits until all learners have data for the next step; False once the barrier is closed."""
        if self._group is None:
            if not self.barrier.arrive(0):
                return False
            self._group = join(self._learner, 0, self._size, self._store.port)
        return self.barrier.arrive(0)

    def close(self) -> None:
        self.barrier.close()
        if self._group is not None:
            self._group.close()


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
        first: Any,
        rank: int,
        clients: Mapping[str, Any] | None = None,
        seed: int = 0,
    ):
        prepare_process(seed)
        self._first, self._rank, self._size = first, rank, setup.config.num_learners
        agent = setup.agent.for_program(setup.config.num_envs, self._size, rank).for_learner(clients)
        self._learner = agent.make_learner(agent.make_networks(setup.spec), setup.spec)
        if setup.config.learner_threads is not None:
            torch.set_num_threads(setup.config.learner_threads)
        self._dataset = agent.make_dataset(replay)
        self._group: LearnerGroup | None = None

    def step(self) -> None:
        if self._group is None:
            here = launch.get_node_context()
            port, state = self._first.meet_learners(here.label, here.host)
            self._learner.restore(state)
            if self._first.arrive(self._rank) is None:
                self._finished = True
                return
            self._group = join(self._learner, self._rank, self._size, port)
        sample = next(self._dataset, None)
        env_steps = None if sample is None else self._first.arrive(self._rank)
        if sample is None or env_steps is None:
            self._finished = True
            return
        self._learner.env_steps = env_steps
        result = self._learner.step(sample)
        if result.priorities is not None:
            self._dataset.update_priorities(sample.info.key, result.priorities)

    def close(self) -> None:
        """Leaves the group and returns prefetched samples to replay."""
        if self._group is not None:
            self._group.close()
        self._dataset.close()


def join(learner: Any, rank: int, size: int, port: int) -> LearnerGroup:
    """Joins `learner` to a group of `size` learners, and returns the group."""
    group = LearnerGroup(rank, size, port, learner.device)
    learner.distribute(group)
    return group
