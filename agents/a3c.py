"""A3C: asynchronous advantage actor-critic (Mnih et al., 2016), as a plan.

Each worker computes the gradients of its own unrolls, and the learner applies them as they arrive. The loss,
the networks, and the settings come from `agents.a2c`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agents.a2c import A2C
from agents.a2c import PRESETS as A2C_PRESETS
from framework.flow import Flow, Node, Par
from framework.programs import GradientWorker, PlanLearner, Preset


class A3C(A2C):
    """Asynchronous advantage actor-critic: the learner applies the workers' gradients as they arrive."""

    worker_class = GradientWorker

    def plan(self, workers: Sequence[Node], learner: PlanLearner) -> Flow:
        gradients = Par(workers, GradientWorker.sample).map(GradientWorker.gradients)
        return gradients.unordered().map(learner.apply)


PRESETS: Mapping[str, Preset] = {
    # Shared hidden layers: with layers of its own, one of five runs falls to 222 on the way.
    "gymnasium:CartPole-v1": Preset(
        agent={
            "unroll_length": 8,
            "shared": True,
            "value_coefficient": 0.1,  # Larger, the gradient of the values would drown the policy's.
            "learning_rate": 3e-3,
            "learning_rate_decay": 150_000,
        },
        run={**A2C_PRESETS["gymnasium:CartPole-v1"].run, "envs_per_actor": 8},
    ),
    "gymnasium:Acrobot-v1": A2C_PRESETS["gymnasium:Acrobot-v1"],
    "atari:*": A2C_PRESETS["atari:*"],
}
