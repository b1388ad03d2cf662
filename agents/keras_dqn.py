"""DQN (Mnih et al., 2015; double: van Hasselt et al., 2016) on Keras: torch, TensorFlow or JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from agents.dqn import CARTPOLE, CARTPOLE_RUN
from framework import config_checks as check
from framework import specs
from framework.backends.keras import KerasAgent, KerasConfig, KerasNetworks, KerasPolicy, mlp
from framework.learners import LossOutput, schedules
from framework.runs.presets import Preset
from framework.specs import EnvironmentSpec
from framework.torch_agents import OffPolicyAgent, OffPolicyConfig
from framework.types import Nest, Transition


@dataclass(frozen=True)
class KerasDQNConfig(KerasConfig, OffPolicyConfig):
    """Settings of DQN on Keras, in addition to `OffPolicyConfig`'s."""

    n_step: int = 5  # Rewards summed before bootstrapping. More: faster propagation, but more off-policy.
    learning_rate_end: float = 0.02  # Final learning rate, as a fraction of the initial one.
    max_gradient_norm: float | None = 10.0  # Larger gradients are scaled down to this.
    huber_delta: float = 1.0  # Errors beyond this count linearly.
    double: bool = True  # The online network chooses the next action, the target network rates it.
    epsilon_start: float = 1.0  # Chance of a random action before learning begins.
    epsilon_end: float = 0.05  # Chance of a random action after the decay.
    epsilon_decay: int = 17_000  # Env steps from `epsilon_start` to `epsilon_end`.
    evaluation_epsilon: float = 0.0  # Chance of a random action in evaluations.
    hidden_sizes: tuple[int, ...] = (128, 128)  # Hidden layers.
    layer_norm: bool = True  # Normalizes hidden layers: more stable, and slower.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.above(self, 0, "huber_delta")
        check.at_least(self, 1, "epsilon_decay", "hidden_sizes")
        check.fraction(self, "epsilon_start", "epsilon_end", "evaluation_epsilon")


class KerasDQNPolicy(KerasPolicy):
    """Epsilon-greedy.

    Args:
      networks: have the layer `q_network`.
      agent: has the settings and the back end.
      evaluation: whether epsilon is `evaluation_epsilon`.
    """

    def __init__(self, networks: KerasNetworks, agent: KerasDQN, evaluation: bool):
        config = agent.config
        super().__init__(networks, ("q_network",), networks.q_network, agent.functions, agent.compiles)
        self._epsilon = schedules.linear(config.epsilon_start, config.epsilon_end, config.epsilon_decay)
        if evaluation:
            self._epsilon = lambda env_steps: config.evaluation_epsilon

    def choose(self, outputs: Nest) -> tuple[np.ndarray, Nest]:
        envs, actions = outputs.shape
        explores = self.random.random(envs) < self._epsilon(self.progress.env_steps)
        return np.where(explores, self.random.integers(actions, size=envs), outputs.argmax(-1)), ()


class KerasDQN(KerasAgent, OffPolicyAgent):
    """Deep Q-learning for one discrete action per env, on the `backend` of the config.

    ```python
    agent = KerasDQN(KerasDQNConfig(backend="jax"))
    program = programs.make_program(agent, environment_factory, programs.RunConfig(num_actors=2))
    ```
    """

    config: KerasDQNConfig = KerasDQNConfig()
    target_names = ("q_network",)

    def make_layers(self, spec: EnvironmentSpec) -> Mapping[str, Any]:
        config, actions = self.config, specs.num_discrete_actions(spec.actions)
        return {"q_network": mlp(spec, config.hidden_sizes, actions, layer_norm=config.layer_norm)}

    def make_policy(self, networks: KerasNetworks, evaluation: bool = False) -> KerasDQNPolicy:
        return KerasDQNPolicy(networks, self, evaluation)

    def loss(self, networks: Any, data: Transition, targets: Any) -> LossOutput:
        """The mean Huber loss of (double) Q-learning errors on a batch of `Transition`s."""
        ops, config, delta = self.ops, self.config, self.config.huber_delta
        values = networks.q_network(data.observation)
        following = targets["q_network"](data.next_observation)
        selector = networks.q_network(data.next_observation) if config.double else following
        best = ops.argmax(selector, -1, keepdims=True)
        next_value = ops.squeeze(ops.take_along_axis(following, best, -1), -1)
        target = data.reward + config.discount * data.discount * next_value
        chosen = ops.take_along_axis(values, ops.expand_dims(data.action, -1), -1)
        sizes = ops.abs(ops.stop_gradient(target) - ops.squeeze(chosen, -1))
        quadratic = ops.minimum(sizes, delta)
        each = 0.5 * ops.square(quadratic) + delta * (sizes - quadratic)
        return LossOutput(ops.mean(each), {"q_mean": ops.mean(values), "td_error": ops.mean(sizes)})


PRESETS: Mapping[str, Preset] = {
    "gymnasium:CartPole-v1": Preset(
        CARTPOLE, {**CARTPOLE_RUN, "max_env_steps": 100_000, "target_return": 475.0}
    ),
}
