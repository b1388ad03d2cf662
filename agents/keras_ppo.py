"""PPO (Schulman et al., 2017) with the clipped objective on Keras: torch, TensorFlow or JAX."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import tree

from framework import config_checks as check
from framework import core, specs
from framework.backends.keras import (
    KerasAgent,
    KerasConfig,
    KerasMinibatchLearner,
    KerasNetworks,
    KerasPolicy,
    mlp,
)
from framework.learners import LossOutput
from framework.runs.presets import Preset
from framework.specs import EnvironmentSpec
from framework.torch_agents import OnPolicyAgent, OnPolicyConfig
from framework.types import Nest, Step


@dataclass(frozen=True)
class KerasPPOConfig(KerasConfig, OnPolicyConfig):
    """Settings of PPO on Keras, in addition to `OnPolicyConfig`'s."""

    gae_lambda: float = 0.95  # 0 trusts the values, 1 the returns: less bias, more variance.
    normalize_advantages: bool = True  # Scales advantages to mean 0 and variance 1 over a batch.
    clip: float = 0.2  # Probability ratios are clipped to 1 +- this.
    entropy_coefficient: float = 0.0  # Weight of the policy's entropy in nats. Higher values explore longer.
    epochs: int = 10  # Passes over a batch. More learn more from it, until the policy moves too far.
    minibatch_size: int | None = 64  # Approximate number of rows in a minibatch. None: the whole batch.
    learning_rate: float = 3e-4  # Initial learning rate of Adam.
    adam_epsilon: float = 1e-5  # Epsilon of Adam. Larger values damp steps where gradients are small.
    max_gradient_norm: float | None = 0.5  # Larger gradients are scaled down to this.
    hidden_sizes: tuple[int, ...] = (64, 64)  # Hidden layers of the policy and of the value.
    activation: str = "tanh"  # Activation of the hidden layers: relu, tanh, elu or silu.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "epochs", "minibatch_size", "hidden_sizes")
        check.fraction(self, "gae_lambda")
        check.between(self, 0, 1, "clip")
        check.one_of(self, ("elu", "relu", "silu", "tanh"), "activation")


class KerasPPOPolicy(KerasPolicy):
    """Samples from the policy, or takes its mode; the action's `log_prob` is an extra.

    Args:
      networks: have the layer `policy`.
      agent: has the back end.
      evaluation: whether to take the mode.
    """

    def __init__(self, networks: KerasNetworks, agent: KerasPPO, evaluation: bool):
        super().__init__(networks, ("policy",), networks.policy, agent.functions, agent.compiles)
        self._greedy = evaluation

    def choose(self, outputs: Nest) -> tuple[np.ndarray, Nest]:
        logits = outputs - outputs.max(-1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        noise = 0.0 if self._greedy else self.random.gumbel(size=logits.shape)
        action = (logits + noise).argmax(-1)
        return action, {"log_prob": np.take_along_axis(log_probs, action[:, None], -1)[:, 0]}


class Rows(NamedTuple):
    """The data of minibatches, `[M, ...]`; the `mask` is 1 on real steps."""

    observation: Any
    action: Any
    log_prob: Any  # of the action under the policy that acted
    advantage: Any
    target: Any  # of the value
    mask: Any


class KerasPPO(KerasAgent, OnPolicyAgent):
    """Proximal policy optimization for one discrete action per env, on the `backend` of the config.

    ```python
    agent = KerasPPO(KerasPPOConfig(backend="tensorflow"))
    program = programs.make_program(agent, environment_factory, programs.RunConfig(envs_per_actor=8))
    ```
    """

    config: KerasPPOConfig = KerasPPOConfig()

    def optimizer_steps(self, env_steps: int) -> float:
        size = self.config.minibatch_size or self.unroll_length * self.items_per_step
        return env_steps / size * self.config.epochs

    def make_layers(self, spec: EnvironmentSpec) -> Mapping[str, Any]:
        from keras.initializers import Orthogonal

        config, actions = self.config, specs.num_discrete_actions(spec.actions)

        def layer(size: int, gain: float) -> Any:
            starts = functools.partial(Orthogonal, math.sqrt(2.0)), functools.partial(Orthogonal, gain)
            return mlp(spec, config.hidden_sizes, size, config.activation, initializers=starts)

        return {"policy": layer(actions, 0.01), "value": layer(1, 1.0)}

    def make_policy(self, networks: KerasNetworks, evaluation: bool = False) -> KerasPPOPolicy:
        return KerasPPOPolicy(networks, self, evaluation)

    def make_learner(self, networks: Any, spec: EnvironmentSpec) -> core.Learner:
        return KerasMinibatchLearner(
            networks,
            self.loss,
            self.config,
            self.functions,
            outputs=lambda networks, observation: networks.value(observation),
            prepare=self.prepare,
            seed=int(torch.randint(2**31, (), device="cpu")),
            compiles=self.compiles,
        )

    def prepare(self, data: Step, values: np.ndarray) -> tuple[Rows, dict[str, Any]]:
        """Rows `[N * T, ...]` of unrolls `[N, T + 1]`, whose last row is for bootstrapping, and metrics.

        Advantages are generalized ones (Schulman et al., 2016, equation 16), in float64.
        """
        config, limit = self.config, self.config.reward_clip
        values, mask = values[..., 0].astype(np.float64), data.mask[:, :-1] > 0
        rewards = data.reward if limit is None else np.clip(data.reward, -limit, limit)
        discounts = config.discount * data.discount.astype(np.float64)
        errors = np.where(mask, (rewards + discounts * np.roll(values, -1, 1) - values)[:, :-1], 0.0)
        advantages, trace = np.zeros_like(values), np.where(mask, config.gae_lambda * discounts[:, :-1], 0.0)
        for t in reversed(range(errors.shape[1])):
            advantages[:, t] = errors[:, t] + trace[:, t] * advantages[:, t + 1]
        advantages = advantages[:, :-1]
        targets, scaled = values[:, :-1] + advantages, advantages
        if config.normalize_advantages:
            real = advantages[mask]
            scaled = np.where(mask, (advantages - real.mean()) / (real.std() + 1e-8), 0.0)
        before = data.action[:, :-1], data.extras["log_prob"][:, :-1]
        rows = Rows(data.observation[:, :-1], *before, scaled, targets, mask.astype(np.float64))
        rows = tree.map_structure(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)
        return rows, {"value_target": targets[mask].mean()}

    def loss(self, networks: Any, data: Rows, targets: Any) -> LossOutput:
        """The clipped surrogate (equation 7), half the value's squared error, and the entropy."""
        ops, config = self.ops, self.config

        def mean(each: Any) -> Any:
            return ops.sum(each * data.mask) / ops.maximum(ops.sum(data.mask), 1e-8)

        log_probs = ops.log_softmax(networks.policy(data.observation), -1)
        new = ops.squeeze(ops.take_along_axis(log_probs, ops.expand_dims(data.action, -1), -1), -1)
        ratios = ops.exp(new - data.log_prob)
        clipped = ops.clip(ratios, 1.0 - config.clip, 1.0 + config.clip)
        policy_loss = mean(-ops.minimum(ratios * data.advantage, clipped * data.advantage))
        errors = ops.squeeze(networks.value(data.observation), -1) - data.target
        value_loss, entropy = (
            0.5 * mean(ops.square(errors)),
            mean(-ops.sum(ops.exp(log_probs) * log_probs, -1)),
        )
        loss = policy_loss + config.value_coefficient * value_loss - config.entropy_coefficient * entropy
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return LossOutput(loss, metrics)


PRESETS: Mapping[str, Preset] = {
    "gymnasium:CartPole-v1": Preset(
        agent={
            "unroll_length": 64,
            "epochs": 8,
            "minibatch_size": 128,
            "learning_rate": 1e-3,
            "learning_rate_decay": 100_000,
            "activation": "relu",  # Values near 70 would saturate tanh units.
        },
        run={
            "num_actors": 1,
            "learner_log_period": 10,
            "envs_per_actor": 8,
            "max_env_steps": 100_000,
            "target_return": 475.0,
            "evaluate_period": 10_000,
            "num_evaluation_episodes": 100,
        },
    ),
}
