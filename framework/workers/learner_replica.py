"""The worker of a learner node of rank 1 or higher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from framework.learners.group import FirstLearner, GroupMember
from framework.workers.worker import ProgramWorker, Setup, prepare_process


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
