"""Ape-X: distributed prioritized replay (Horgan et al., 2018), as a plan.

Networks, loss and most settings come from `agents.dqn`. Workers write to replay while the learner learns
from it. The rate limiter of the table holds the replay ratio: the branch that is ahead waits for the other.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agents.dqn import ATARI, CARTPOLE, DQN, MINATAR, MINATAR_RUN, YOUNG, DQNConfig
from framework import config_checks as check
from framework import core, losses
from framework.adders import Adder
from framework.flow import Flow, Node, Par, concurrent
from framework.networks import as_tensors, redraw_noise
from framework.programs import PlanLearner, Preset, RolloutWorker
from framework.runs.presets import ATARI_2015_RUN, HERE
from framework.types import Transition


@dataclass(frozen=True)
class ApeXConfig(DQNConfig):
    """Settings of Ape-X, in addition to `DQNConfig`'s, with the paper's defaults for exploration."""

    rollout_length: int = 4  # Steps of an env in one call of a worker. More: fewer calls, older parameters.
    n_step: int = 3  # Rewards summed before bootstrapping. More: faster propagation, but more off-policy.
    prioritized: bool = True  # Draws items with large errors more often.
    epsilon_end: float = 0.4  # Chance of a random action after the decay, of the first env.
    epsilon_ladder: float = 7.0  # Env i of B explores with epsilon ** (1 + this * i / (B - 1)).

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "rollout_length")


class PriorityWorker(RolloutWorker):
    """A `RolloutWorker` that computes the initial priorities of its items with its own parameters."""

    agent: ApeX

    def make_adder(self, client: Any) -> Adder:
        # Adders also write in a thread of their own, which must not change the noise of the policy.
        tensors = {id(each): each for each in (*self.networks.parameters(), *self.networks.buffers())}
        priorities = functools.partial(self.agent.priorities, copy.deepcopy(self.networks, tensors))
        return self.agent.make_adder(client, self.spec, priorities)


class ApeX(DQN):
    """Distributed prioritized replay: each env has an exploration rate of its own, workers set priorities."""

    config: ApeXConfig = ApeXConfig()
    worker_class = PriorityWorker

    def build(self, graph: core.Graph) -> None:
        graph.add_evaluator(graph.add_plan(graph.add_replay()))

    def plan(self, workers: Sequence[Node], learner: PlanLearner) -> Flow:
        items, limit = self.config.rollout_length * self.num_envs // len(workers), self.config.insert_burst
        if items > limit:
            raise ValueError(
                f"rollout_length: got {items} items in one call of a worker, expected at most {limit}, "
                "insert_burst. Lower it, or increase insert_burst."
            )
        collect = functools.partial(RolloutWorker.collect, steps=self.config.rollout_length)
        store = Flow.of(Par(workers, collect).unordered(), learner.replay_accepts)
        return concurrent(store, learner.batches().map(learner.step))

    @torch.inference_mode()
    def priorities(self, networks: Any, transitions: Transition) -> np.ndarray:
        """The priorities `[k]` of new items, from the errors of the acting networks."""
        redraw_noise(networks, None)  # The noise of the policy has a row for each env, not for each item.
        data = as_tensors(transitions)
        if self.config.normalize_observations:
            data = networks.normalizer.records(data)
        _, priorities, _ = self.item_losses(networks, networks.q_network, data)
        return losses.item_priorities(priorities).numpy()


PRESETS: Mapping[str, Preset] = {
    "gymnasium:CartPole-v1": Preset(
        agent=CARTPOLE,
        run={"num_actors": 2, "envs_per_actor": 2, "max_env_steps": 50_000, "evaluate_period": 10_000},
    ),
    "minatar:*": Preset(MINATAR, {**MINATAR_RUN, "num_actors": 2, "envs_per_actor": 4}, sources=YOUNG),
    # 19 learner steps of 512 for 12,500 new transitions. The paper's optimizer is RMSprop, with this rate.
    "atari:*": Preset(
        {
            **ATARI,
            "double": True,
            "dueling": True,
            "n_step": 3,
            "batch_size": 512,
            "samples_per_insert": 0.78,
            "insert_burst": 1_024,
            "min_replay_size": 50_000,
            "max_replay_size": 2_000_000,
            "max_gradient_norm": 40.0,
            "target_update_period": 2_500,
            "importance_sampling_annealing": 10**12,  # The exponent stays at 0.4.
            "epsilon_start": 0.4,
            "epsilon_end": 0.4,
            "evaluation_epsilon": 0.0,
        },
        {**ATARI_2015_RUN, "num_actors": 2},
        "Horgan et al. (2018), section 4.1 and appendix C",
        {HERE: "insert_burst", "Hessel et al. (2018), table 1": "adam_epsilon"},
    ),
}
