"""DQN: deep Q-learning from replay (Mnih et al., 2015), with several parts of Rainbow.

Double Q-learning (van Hasselt et al., 2016), dueling networks (Wang et al., 2016), n-step targets
(Sutton, 1988), prioritized replay (Schaul et al., 2016), noisy networks (Fortunato et al., 2018) and
Munchausen's rewards (Vieillard et al., 2020) are fields of the config. The other agents of the family are
subclasses with other `item_losses`.

The exploration schedule counts the env steps of the whole program, which a policy gets with its parameters.
Until learning begins, epsilon is `epsilon_start`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tree
from torch import nn

from framework import config_checks as check
from framework import losses, networks, replay, specs
from framework.learners import LossContext, LossOutput, schedules
from framework.networks import epsilon_greedy, mask_values, redraw_noise
from framework.runs.presets import ATARI_2015_RUN, ATARI_RUN, HERE, Preset
from framework.specs import EnvironmentSpec
from framework.torch_agents import OffPolicyAgent, OffPolicyConfig, TorchPolicy
from framework.types import Nest, Transition

# Losses `[N]`, priorities `[N]` and metrics.
ItemLosses = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class DQNConfig(OffPolicyConfig):
    """Settings of DQN, in addition to `OffPolicyConfig`'s."""

    # What is learned from.
    n_step: int = 5  # Rewards summed before bootstrapping. More: faster propagation, but more off-policy.
    prioritized: bool = False  # Draws items with large errors more often.
    priority_exponent: float = 0.6  # 0 draws uniformly, 1 proportionally to the error.
    importance_sampling_exponent: float = 0.4  # Initial exponent of the importance weights.
    importance_sampling_annealing: int = 80_000  # Env steps until that exponent is 1, a full correction.

    # Learning.
    learning_rate_end: float = 0.02  # Final learning rate, as a fraction of the initial one.
    max_gradient_norm: float | None = 10.0  # Larger gradients are scaled down to this.
    huber_delta: float = 1.0  # Errors beyond this count linearly.
    double: bool = True  # The online network chooses the next action, the target network rates it.
    munchausen: float = 0.0  # Weight of the log-policy in the reward; the paper's is 0.9. 0 is Q-learning.
    munchausen_temperature: float = 0.03  # Temperature of the softmax policy in targets. Higher: more random.
    munchausen_clip: float = 1.0  # Log-policies times the temperature are at least minus this in the reward.

    # Exploration.
    epsilon_start: float | None = None  # Chance of a random action before learning begins; None: 1, noisy 0.
    epsilon_end: float | None = None  # Chance of a random action after the decay; None: 0.05, noisy 0.
    epsilon_decay: int = 17_000  # Env steps from `epsilon_start` to `epsilon_end`.
    epsilon_ladder: float = 0.0  # Env i of B explores with epsilon ** (1 + this * i / (B - 1)); Ape-X: 7.
    evaluation_epsilon: float = 0.0  # Chance of a random action in evaluations.

    # Networks.
    # Image layers: nature, normalized (PQN's), deep, spectral (Beyond the Rainbow's), shallow, or
    # data_efficient.
    torso: str = "nature"
    # Width of the dense layer after the convolutions. None: the torso's own, 512 of nature; 0: none, so that
    # `hidden_sizes` follow them, as in the papers of dueling networks, Rainbow and IQN.
    torso_size: int | None = None
    hidden_sizes: tuple[int, ...] = (128, 128)  # Hidden layers after the encoder.
    layer_norm: bool = True  # Normalizes hidden layers: more stable, about 20 % slower.
    dueling: bool = False  # A stream for the state's value, another for the actions' advantages.
    noisy: bool = False  # Explores by learned noise on the weights after the encoder.
    initial_noise: float = 0.5  # Initial noise relative to a layer's weights. Less: less early exploration.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.above(self, 0, "huber_delta", "munchausen_temperature", "munchausen_clip", "initial_noise")
        check.at_least(self, 0, "priority_exponent", "epsilon_ladder", "torso_size")
        check.at_least(self, 1, "importance_sampling_annealing", "epsilon_decay", "hidden_sizes")
        check.fraction(self, "importance_sampling_exponent", "munchausen")
        check.one_of(self, networks.CONVOLUTIONS, "torso")
        check.fraction(self, "epsilon_start", "epsilon_end", "evaluation_epsilon")

    @property
    def munchausen_settings(self) -> tuple[float, float, float]:
        """The last arguments of Munchausen's losses: scale, temperature and clip."""
        return self.munchausen, self.munchausen_temperature, self.munchausen_clip


class DQNNetworks(nn.Module):
    """The only variable of DQN: `q_network`.

    Args:
      config: settings of the network.
      spec: the spec of one env.
      outputs_per_action: K, the number of the network's outputs for each action.
    """

    def __init__(self, config: DQNConfig, spec: EnvironmentSpec, outputs_per_action: int = 1):
        super().__init__()
        self.num_actions = specs.num_discrete_actions(spec.actions)
        self.actions = networks.Actions(spec.actions)
        body = config.hidden_sizes, config.dueling, config.layer_norm
        noise = config.initial_noise if config.noisy else 0.0
        torso = config.torso, config.torso_size
        self.q_network = networks.QNetwork(
            spec.observations, self.num_actions, *body, outputs_per_action, noise, *torso
        )

    def expected(self, outputs: torch.Tensor) -> torch.Tensor:
        """Expected returns `[N, A]` of outputs of the network or of its target network."""
        return outputs

    def values(self, observation: Nest) -> torch.Tensor:
        """Expected returns of all actions, `[N, A]`, by which the policy chooses."""
        values = self.expected(self.q_network(observation))
        # Too few columns would fail only in the loss, and too many would not fail.
        if values.shape[1:] != (self.num_actions,):
            raise ValueError(
                f"q_network: got values of shape {tuple(values.shape)}, expected (envs, {self.num_actions}). "
                "Fix the network's last layer."
            )
        return values


class DQNPolicy(TorchPolicy):
    """Epsilon-greedy, with one epsilon per env.

    Args:
      networks: the networks, which the policy reads at each step.
      config: settings of the epsilon schedule.
      evaluation: whether epsilon is `config.evaluation_epsilon`.
    """

    def __init__(self, networks: DQNNetworks, config: DQNConfig, evaluation: bool = False):
        super().__init__(networks, networks.actions, variables=("q_network",))
        self._values, self._noisy, self._evaluation = networks.values, config.noisy, evaluation
        start, end = (0.0, 0.0) if config.noisy else (1.0, 0.05)
        start = start if config.epsilon_start is None else config.epsilon_start
        end = end if config.epsilon_end is None else config.epsilon_end
        self._epsilon = schedules.linear(start, end, config.epsilon_decay)
        self._ladder = config.epsilon_ladder
        if evaluation:
            self._epsilon, self._ladder = (lambda env_steps: config.evaluation_epsilon), 0.0

    def initial_state(self, batch_size: int) -> Nest:
        """Each env's exponent of epsilon, float64[B]; `()` if all envs explore alike.

        As part of the state, the exponent stays with its env, also in a batch with other actors' envs.
        """
        if self._ladder == 0.0:
            return ()
        return 1.0 + self._ladder * np.arange(batch_size) / max(batch_size - 1, 1)

    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        if self._noisy:
            # Each env has noise of its own, new at each step.
            generator = None if self._evaluation else self.random
            redraw_noise(self.networks, generator, tree.flatten(observation)[0].shape[0])
        epsilon: Any = self._epsilon(self.progress.env_steps)
        if len(state):
            epsilon = torch.as_tensor(epsilon**state, device=self.device)
        return epsilon_greedy(self._values(observation), observation, epsilon, self.random), (), state


class DQN(OffPolicyAgent):
    """Deep Q-learning for one discrete action per env.

    ```python
    agent = DQN(DQNConfig(n_step=3, prioritized=True))
    program = programs.make_program(agent, environment_factory, programs.RunConfig(num_actors=2))
    ```
    """

    config: DQNConfig = DQNConfig()
    target_names = ("q_network",)
    takes_action_masks = True
    networks_class: type[DQNNetworks] = DQNNetworks
    # Members that the family needs of networks.
    members: tuple[str, ...] = ("actions", "num_actions", "q_network", "values")

    def make_networks(self, spec: EnvironmentSpec) -> DQNNetworks:
        return self.custom_networks(spec, self.networks_class, self.members)

    def make_policy(self, networks: DQNNetworks, evaluation: bool = False) -> DQNPolicy:
        return DQNPolicy(networks, self.config, evaluation)

    def make_sampler(self) -> Any:
        if self.config.prioritized:
            return replay.selectors.Prioritized(self.config.priority_exponent)
        return super().make_sampler()

    def item_losses(
        self, networks: DQNNetworks, target: nn.Module, data: Transition, context: LossContext | None = None
    ) -> ItemLosses:
        """The losses `[N]`, priorities `[N]` and metrics of N `Transition`s. The family overrides this.

        Args:
          networks: the networks that learn.
          target: the target network of `q_network`.
          data: the transitions, on the device of the networks.
          context: for losses that draw random numbers. None draws from torch's global generator.
        """
        config = self.config
        values = networks.values(data.observation)
        with torch.no_grad():
            next_values = mask_values(target(data.next_observation), data.next_observation)
            if config.munchausen:
                first_values = mask_values(target(data.observation), data.observation)
            elif config.double and target is not networks.q_network:
                selector = mask_values(networks.values(data.next_observation), data.next_observation)
            else:
                selector = next_values
        inputs = (values, data.action, *self.rewards(data), next_values)
        if config.munchausen:
            errors = losses.munchausen_errors(*inputs, first_values, *config.munchausen_settings)
        else:
            errors = losses.double_q_errors(*inputs, selector)
        sizes = errors.detach().abs()
        metrics = {"q_mean": values.mean(), "td_error": sizes.mean()}
        return losses.huber(errors, self.config.huber_delta), sizes, metrics

    def loss(self, networks: DQNNetworks, batch: replay.ReplaySample, context: LossContext) -> LossOutput:
        """The mean of `item_losses` over a batch of `Transition`s, with importance weights if prioritized."""
        config, target = self.config, context.targets["q_network"]
        if config.noisy:
            for network in (networks, target):
                redraw_noise(network, context.normal)
        each, priorities, metrics = self.item_losses(networks, target, batch.data, context)
        if not config.prioritized:
            return LossOutput(each.mean(), metrics)
        start = config.importance_sampling_exponent
        exponent = schedules.linear(start, 1.0, config.importance_sampling_annealing)(context.env_steps)
        weights = context.importance_weights(batch.info, exponent)
        metrics["importance_weight"] = weights.mean()
        return LossOutput((weights * each).mean(), metrics, losses.item_priorities(priorities))


CARTPOLE = {"samples_per_insert": 24.0, "learning_rate_decay": 50_000, "epsilon_decay": 12_000}
CARTPOLE_RUN = {"envs_per_actor": 4, "max_env_steps": 50_000, "evaluate_period": 2_000}
# A learner step for every 8 env steps, where MinAtar's paper (Young and Tian, 2019) makes one for each.
MINATAR = {
    "n_step": 3,
    "batch_size": 32,
    "samples_per_insert": 4.0,
    "insert_burst": 64,
    "min_replay_size": 5_000,
    "learning_rate": 3e-4,
    "learning_rate_decay": 1_000_000,
    "learning_rate_end": 0.1,
    "target_update_rate": 0.01,
    "epsilon_decay": 100_000,
    "hidden_sizes": (),  # The convolution has a layer of 128 after it.
}
MINATAR_RUN = {
    "num_actors": 1,
    "envs_per_actor": 8,
    "max_env_steps": 1_000_000,
    "evaluate_period": 50_000,
    "learner_log_period": 1_000,
}
# A learner step of 32 items for every 4 env steps.
ATARI = {
    "n_step": 1,
    "reward_clip": 1.0,
    "batch_size": 32,
    "samples_per_insert": 8.0,
    "insert_burst": 64,
    "min_replay_size": 20_000,
    "max_replay_size": 1_000_000,
    "learning_rate": 6.25e-5,
    "adam_epsilon": 1.5e-4,
    "max_gradient_norm": None,
    "double": False,
    "target_update_rate": 1.0,
    "target_update_period": 2_000,
    "epsilon_end": 0.01,
    "epsilon_decay": 250_000,
    "evaluation_epsilon": 0.001,
    "torso_size": 0,
    "hidden_sizes": (512,),
    "layer_norm": False,
}
# What changed in the agents of 2017 and 2018.
ATARI_2017 = {
    **ATARI,
    "min_replay_size": 50_000,
    "target_update_period": 2_500,
    "epsilon_decay": 1_000_000,
    "adam_epsilon": 3.125e-4,
}
# Parameters are as fresh as if each learner step had been published.
DQN_RUN = {"update_period": 1, "publish_period": 4}
ATARI_2017_RUN = {**ATARI_2015_RUN, **DQN_RUN}
OURS = {HERE: "insert_burst"}
YOUNG = {"Young and Tian (2019)": "batch_size epsilon_decay min_replay_size"}
PRESETS: Mapping[str, Preset] = {
    # 494.2 to 500 of 500, greedy over 100 episodes, at 50,000 steps on seeds 1 to 5.
    "gymnasium:CartPole-v1": Preset(
        CARTPOLE, {**CARTPOLE_RUN, "max_env_steps": 100_000, "target_return": 475.0}
    ),
    "gymnasium:LunarLander-v3": Preset(
        agent={
            "n_step": 3,
            "samples_per_insert": 32.0,  # A learner step for every 4 env steps.
            "min_replay_size": 2_000,
            "learning_rate_decay": 200_000,
            "target_update_rate": 0.01,
            "epsilon_decay": 50_000,
        },
        run={"num_actors": 1, "envs_per_actor": 8, "max_env_steps": 200_000, "evaluate_period": 20_000},
    ),
    # 14.1 to 19.0, greedy over 100 episodes, at 1,000,000 steps on seeds 1 to 5.
    "minatar:Breakout": Preset(MINATAR, MINATAR_RUN),
    "minatar:Seaquest": Preset(MINATAR, MINATAR_RUN),
    # An episode has 2,500 steps, whatever the agent does.
    "minatar:Freeway": Preset(
        MINATAR, {**MINATAR_RUN, "evaluate_period": 200_000, "num_evaluation_episodes": 8}
    ),
    "minatar:*": Preset(MINATAR, MINATAR_RUN, sources=YOUNG),
    # Found for hours on a few cores. The paper, too, makes a learner step of 32 items for every 4 env steps.
    "atari:Pong": Preset(
        agent={
            "n_step": 3,
            "batch_size": 32,
            "samples_per_insert": 8.0,
            "insert_burst": 64,
            "min_replay_size": 10_000,
            "max_replay_size": 200_000,
            "learning_rate": 1e-4,
            "learning_rate_decay": 800_000,
            "learning_rate_end": 0.1,
            "autocast": True,
            "dueling": True,
            "hidden_sizes": (512,),
            "target_update_rate": 1.0,
            "target_update_period": 1_000,
            "epsilon_decay": 100_000,
            "epsilon_end": 0.01,
        },
        run={
            "num_actors": 1,
            "envs_per_actor": 8,
            "max_env_steps": 800_000,
            "max_evaluation_steps": 27_000,  # Whole games.
            "evaluate_period": 50_000,
            "num_evaluation_episodes": 4,
            "learner_log_period": 1_000,
            "update_period": 4,
            "publish_period": 4,
        },
    ),
    "atari:*": Preset(ATARI, {**ATARI_RUN, **DQN_RUN}, "Castro et al. (2018), dqn.gin of Dopamine 4", OURS),
}
