"""BatchPPO: settings of PPO, as in its experiment (Hafner, Davidson and Vanhoucke, 2017).

Networks, loss, and learner come from `agents.ppo`. A batch is 25 whole episodes. An iteration makes 25
steps on the whole batch, with separate learning rates for policy and value. The penalty on the divergence
from the policy that acted adapts to a target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agents.ppo import PPO, PPOConfig
from framework.runs.presets import Preset


@dataclass(frozen=True)
class BatchPPOConfig(PPOConfig):
    """Settings of BatchPPO: `PPOConfig` with the defaults of its experiment."""

    # Data.
    unroll_length: int = 1000  # Steps of the longest episode.
    episodes_per_batch: int | None = 25  # Whole episodes in a batch. None: one unroll of every env.
    normalize_observations: bool = True  # Scales observations to mean 0, variance 1 by running statistics.
    normalize_rewards: bool = True  # Scales rewards so that returns have variance 1; keeps the mean.

    # Targets and objective.
    discount: float = 0.995  # Per env step. Higher values look further ahead and learn more slowly.
    gae_lambda: float = 1.0  # 0 trusts the values, 1 the returns: less bias, more variance.
    target_kl: float | None = 0.01  # In nats. Uses a KL penalty that adapts to this divergence, not the clip.

    # Optimization.
    epochs: int = 25  # Passes over a batch. More learn more from it, until the policy moves too far.
    minibatch_size: int | None = None  # Approximate number of real steps in a minibatch. None: the batch.
    learning_rate: float = 1e-4  # Initial learning rate of Adam.
    value_learning_rate: float | None = 1e-3  # Learning rate of the value's layers. None: `learning_rate`.
    value_coefficient: float = 1.0  # Weight of half the squared error of the values.
    adam_epsilon: float = 1e-8  # Epsilon of Adam. Larger values damp steps where gradients are small.
    max_gradient_norm: float | None = None  # Larger gradients are scaled down to this.

    # Networks.
    hidden_sizes: tuple[int, ...] = (200, 100)  # Hidden layers of the policy and of the value.
    activation: str = "relu"  # Activation of the hidden layers: relu, tanh, elu or silu.
    initial_std: float = 0.37  # Initial standard deviation of actions, in half-widths of their range.
    tanh_mean: bool = True  # A tanh keeps the mean of actions in their range; it learns slower at bounds.


class BatchPPO(PPO):
    """Settings of PPO: batches of whole episodes, and a penalty on the divergence in place of the clip."""

    config: BatchPPOConfig = BatchPPOConfig()


_RUN = {
    "num_actors": 1,
    "envs_per_actor": 25,
    "learner_log_period": 1,
    "max_env_steps": 1_000_000,
    "evaluate_period": 50_000,
}

# Discounts and lengths come from the published configuration; the number of steps is 1,000,000 for all.
PRESETS: Mapping[str, Preset] = {
    "gymnasium:HalfCheetah-v5": Preset(agent={"discount": 0.99}, run=_RUN),
    "gymnasium:Hopper-v5": Preset(run=_RUN),
    "gymnasium:Walker2d-v5": Preset(run=_RUN),
    "gymnasium:Reacher-v5": Preset(agent={"discount": 0.985, "unroll_length": 50}, run=_RUN),
    "gymnasium:Pendulum-v1": Preset(agent={"unroll_length": 200}, run=_RUN),
}
