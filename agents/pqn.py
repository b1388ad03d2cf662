"""PQN: parallel Q-learning without replay and without a target network (Gallici et al., 2024).

Many envs act epsilon-greedily, and each unroll is learned from in a few epochs of minibatches, as PPO does
it. Layer normalization makes that stable. The targets are lambda-returns over the largest values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import tree

from agents.dqn import DQN, DQNConfig, DQNNetworks, DQNPolicy
from framework import config_checks as check
from framework import losses
from framework.learners import LossContext, LossOutput, Prepared
from framework.networks import mask_values
from framework.replay import ReplaySample
from framework.runs.presets import Preset
from framework.specs import EnvironmentSpec
from framework.torch_agents import MinibatchAgent, UnrollConfig


@dataclass(frozen=True)
class PQNConfig(UnrollConfig):
    """Settings of PQN, in addition to `UnrollConfig`'s.

    A learner step uses one unroll of every env of the program, `epochs` times.
    """

    unroll_length: int = 32  # Steps of an env in an unroll. More: less bias, and older data.
    trace_lambda: float = 0.65  # 0 bootstraps after one step, 1 at the end of an unroll.
    reward_scale: float = 1.0  # Rewards are multiplied by this: less for large returns.

    # Optimization.
    epochs: int = 2  # Passes over a batch.
    minibatch_size: int | None = 128  # Approximate number of steps in a minibatch. None: the whole batch.
    learning_rate: float = 5e-4  # Initial learning rate of RAdam.
    max_gradient_norm: float | None = 10.0  # Larger gradients are scaled down to this.

    # Exploration.
    epsilon_start: float = 1.0  # Chance of a random action before learning begins.
    epsilon_end: float = 0.05  # Chance of a random action after the decay.
    epsilon_decay: int = 1_000_000  # Env steps from `epsilon_start` to `epsilon_end`.
    evaluation_epsilon: float = 0.0  # Chance of a random action in evaluations.

    # Networks.
    torso: str = "normalized"  # Image layers: nature with layer normalization, or one of DQN's torsos.
    hidden_sizes: tuple[int, ...] = (128, 128)  # Hidden layers after the encoder.
    layer_norm: bool = True  # Normalizes hidden layers, which replaces target networks.
    dueling: bool = False  # A stream for the state's value, another for the actions' advantages.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "epochs", "minibatch_size")
        check.fraction(self, "trace_lambda")
        check.above(self, 0, "reward_scale")
        self.of_dqn()  # It checks the other fields.

    def of_dqn(self) -> DQNConfig:
        """The settings of the networks and of the policy, which are DQN's."""
        names = ["epsilon_start", "epsilon_end", "epsilon_decay", "evaluation_epsilon"]
        names += ["torso", "hidden_sizes", "layer_norm", "dueling"]
        return DQNConfig(**{name: getattr(self, name) for name in names})


class Rows(NamedTuple):
    """The data of minibatches: `[M, ...]` real steps."""

    observation: Any
    action: torch.Tensor
    target: torch.Tensor  # of the action's value


class PQN(MinibatchAgent):
    """Parallel Q-learning for one discrete action per env.

    ```python
    agent = PQN(PQNConfig(unroll_length=64))
    program = programs.make_program(agent, environment_factory, programs.RunConfig(envs_per_actor=128))
    ```
    """

    config: PQNConfig = PQNConfig()
    takes_action_masks = True

    def make_networks(self, spec: EnvironmentSpec) -> DQNNetworks:
        return self.custom_networks(
            spec, lambda config, spec: DQNNetworks(config.of_dqn(), spec), DQN.members
        )

    def make_policy(self, networks: DQNNetworks, evaluation: bool = False) -> DQNPolicy:
        return DQNPolicy(networks, self.config.of_dqn(), evaluation)

    def make_optimizer(self, networks: DQNNetworks) -> torch.optim.Optimizer:
        config = self.config
        return torch.optim.RAdam(networks.parameters(), lr=config.learning_rate, eps=config.adam_epsilon)

    def prepare(self, networks: DQNNetworks, batch: ReplaySample, context: LossContext) -> Prepared:
        """The targets of unrolls `[N, T + 1]`, whose last row is for bootstrapping."""
        config, data = self.config, batch.data
        observation = tree.map_structure(lambda leaf: leaf.flatten(0, 1), data.observation)
        values = networks.values(observation)
        best = mask_values(values, observation).amax(-1).view(data.mask.shape)
        actions = data.action.long()
        taken = values.gather(-1, actions.view(-1, 1)).view(data.mask.shape)
        rewards = config.reward_scale * self.rewards(data)
        discounts = config.discount * data.discount.float()
        targets = losses.peng_q_lambda(rewards, discounts, taken, best, data.mask, config.trace_lambda)
        mask = losses.transition_mask(data.mask)
        real = mask.flatten().nonzero().squeeze(-1)
        rows = Rows(observation, actions.flatten(), targets.flatten())
        metrics = {
            "explained_variance": losses.explained_variance(taken, targets, mask),
            "q_mean": losses.masked_mean(taken, mask),
            "td_error": losses.masked_mean((targets - taken).abs(), mask),
        }
        return Prepared(tree.map_structure(lambda leaf: leaf[real], rows), len(real), metrics)

    def loss(self, networks: DQNNetworks, rows: Rows, context: LossContext) -> LossOutput:
        """Half the mean squared error of one minibatch."""
        taken = networks.values(rows.observation).gather(-1, rows.action.unsqueeze(-1)).squeeze(-1)
        loss = losses.value_loss(taken, rows.target)
        weight = None if context.total is None else loss.new_tensor(len(rows.target))
        return LossOutput(loss, {}, weight=weight)


_PAPER = "Gallici et al. (2024), pqn_minatar.yaml"

PRESETS: Mapping[str, Preset] = {
    "gymnasium:CartPole-v1": Preset(
        agent={
            "unroll_length": 64,
            "trace_lambda": 0.95,
            "reward_scale": 0.1,
            "epochs": 4,
            "learning_rate": 1e-3,
            "learning_rate_decay": 100_000,
            "epsilon_decay": 20_000,
        },
        run={
            "num_actors": 1,
            "envs_per_actor": 32,
            "max_env_steps": 100_000,
            "target_return": 475.0,
            "evaluate_period": 10_000,
            "num_evaluation_episodes": 100,
            "learner_log_period": 10,
        },
    ),
    # Decays are shares of 10 million steps, for runs of any length.
    "minatar:*": Preset(
        agent={
            "unroll_length": 32,
            "trace_lambda": 0.65,
            "epochs": 2,
            "minibatch_size": 128,
            "learning_rate": 5e-4,
            "learning_rate_decay": 10_000_000,
            "epsilon_decay": 1_000_000,
            "hidden_sizes": (),  # The convolution has a layer of 128 after it.
        },
        run={
            "num_actors": 1,
            "envs_per_actor": 128,
            "max_env_steps": 10_000_000,
            "evaluate_period": 500_000,
            "learner_log_period": 10,
        },
        source=_PAPER,
        sources={_PAPER: "envs_per_actor"},
    ),
}
