"""Three algorithms of RLlib Flow (Liang et al., 2021) as plans: PPO, IMPALA, and DQN.

    repertory train examples.flows:PPOPlan --engine processes --num-actors 2
    repertory train examples.flows:IMPALAPlan --engine ray
    repertory train examples.flows:DQNPlan --engine serial

Config, networks, policy, loss, and learner are those of the agent without a plan: a plan only says which node
waits for which. A2C, A3C, Ape-X, MAML, and PPO + DQN, in `agents`, are plans too. See docs/flow.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from agents import dqn, impala, ppo
from framework import core
from framework.flow import Flow, Node, Par, concurrent
from framework.programs import PlanLearner, Preset, RolloutWorker, concatenate


class PPOPlan(ppo.PPO):
    """PPO as a plan: workers wait while the learner makes its epochs on the unrolls of all of them."""

    PRESETS = ppo.PRESETS

    def __init__(self, config: ppo.PPOConfig | None = None, networks_fn: core.NetworksFn | None = None):
        super().__init__(config, networks_fn)
        for field, only in (("max_policy_lag", 0), ("episodes_per_batch", None)):
            if (value := getattr(self.config, field)) != only:
                raise ValueError(f"{field}: got {value}, expected {only} for a plan. Use PPO.")

    def plan(self, workers: Sequence[Node], learner: PlanLearner) -> Flow:
        return Par(workers, RolloutWorker.sample).sync().map(concatenate).map(learner.step)


class IMPALAPlan(impala.IMPALA):
    """IMPALA as a plan: a batch is the next unrolls that are ready, while workers sample ahead."""

    PRESETS = impala.PRESETS

    @property
    def items_per_step(self) -> int:
        return self.num_envs  # of one worker; the plan joins the unrolls of several

    def plan(self, workers: Sequence[Node], learner: PlanLearner) -> Flow:
        config, envs = self.config, self.num_envs // len(workers)
        if config.batch_size % envs:
            raise ValueError(
                f"batch_size: got {config.batch_size}, expected a multiple of {envs}, the envs of a worker."
            )
        # IMPALA's queue and learner hold as many samples of each worker, with older parameters.
        ahead = config.queue_batches + config.prefetch_batches - 1
        samples = Par(workers, RolloutWorker.sample).unordered(depth=ahead)
        return samples.batch(config.batch_size // envs).map(concatenate).map(learner.step)


class DQNPlan(dqn.DQN):
    """DQN as a plan of two branches: workers fill replay, and the learner draws from it.

    The rate limiter of the table holds the replay ratio: the branch that is ahead waits for the other.
    """

    PRESETS = {
        "gymnasium:CartPole-v1": Preset(
            agent=dqn.CARTPOLE,
            run={"num_actors": 2, "envs_per_actor": 2, "max_env_steps": 50_000, "evaluate_period": 10_000},
        ),
    }

    def build(self, graph: core.Graph) -> None:
        graph.add_evaluator(graph.add_plan(graph.add_replay()))

    def plan(self, workers: Sequence[Node], learner: PlanLearner) -> Flow:
        # The items of a call must fit into the window of the rate limiter.
        steps = max(1, min(4, self.config.insert_burst * len(workers) // self.num_envs))
        collect = functools.partial(RolloutWorker.collect, steps=steps)
        store = Flow.of(Par(workers, collect).unordered(), learner.replay_accepts)
        return concurrent(store, learner.batches().map(learner.step))
