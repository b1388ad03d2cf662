"""DQN: deep Q-learning from replay (Mnih et al., 2015), with the parts of Rainbow that pay for themselves.

Double Q-learning (van Hasselt et al., 2016), duelling networks (Wang et al., 2016), n-step targets
(Sutton, 1988) and prioritized replay (Schaul et al., 2016) are fields of the config.

The policy has no clock, so what falls over time follows the *learner's* steps: the learner publishes the
epsilon of the moment beside the parameters. Replay's rate limiter ties the learner's steps to the
actors', so this is the same schedule on every engine, and it is part of the learner's checkpoint. Until
``min_replay_size`` items are there, actions are as random as ``epsilon_start`` says.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from dm_env import specs as dm_specs
from torch import nn

from framework import config_checks as check
from framework import core, learners, losses, networks
from framework.learners import LossContext, LossOutput, distributed, schedules
from framework.programs.presets import Preset


@dataclass(frozen=True)
class DQNConfig:
    """Settings of DQN. A *learner step* is one batch; an *item* is one n-step transition."""

    # What is learned from.
    discount: float = 0.99  # Per env step. Higher looks further ahead, and learns slower.
    n_step: int = 5  # Rewards summed before bootstrapping. More passes rewards on faster, off-policy.
    reward_clip: float | None = None  # Rewards are clipped to +- this in the learner; None keeps them.

    # Replay.
    max_replay_size: int = 100_000  # Items kept; the oldest go first.
    min_replay_size: int = 1_000  # Items there before learning begins.
    batch_size: int = 128  # Items per learner step.
    # Times an item is drawn on average: learner steps per item, times batch.
    samples_per_insert: float = 16.0
    insert_burst: int = 256  # Items that actors may be ahead or behind of it; each has as many on its way.
    prioritized: bool = False  # Draws items with large errors more often.
    priority_exponent: float = 0.6  # 0 draws uniformly, 1 proportionally to the error.
    importance_sampling_exponent: float = 0.4  # How far weights undo the bias of that, at the start.
    importance_sampling_steps: int = 10_000  # Learner steps until it has risen to 1, a full correction.

    # Learning.
    learning_rate: float = 1e-3  # Of Adam.
    learning_rate_decay_steps: int | None = None  # Learner steps until it has fallen; None keeps it.
    learning_rate_end: float = 0.02  # What is left of it then, as a fraction.
    adam_epsilon: float = 1e-8  # Larger damps steps where gradients are small.
    max_gradient_norm: float | None = 10.0  # Larger gradients are scaled down to this.
    huber_delta: float = 1.0  # Errors beyond this count linearly.
    double: bool = True  # The online network chooses the next action, the target network rates it.
    target_update_period: int = 1  # Learner steps between updates of the target network.
    target_update_rate: float = 0.02  # 1 copies the online network, less moves towards it.

    # Exploration.
    epsilon_start: float = 1.0  # Chance of a random action before learning begins.
    epsilon_end: float = 0.05  # And after the decay.
    epsilon_decay_steps: int = 2_000  # Learner steps from one to the other.
    epsilon_ladder: float = 0.0  # Env i of B explores with epsilon ** (1 + this * i / (B - 1)); Ape-X: 7.
    evaluation_epsilon: float = 0.0  # Chance of a random action when evaluated.

    # Networks and device.
    hidden_sizes: tuple[int, ...] = (128, 128)  # Hidden layers behind the encoder.
    layer_norm: bool = True  # Normalises hidden layers: steadier, some 20 % slower.
    dueling: bool = False  # A stream for the state's value, another for the actions' advantages.
    device: str = "cpu"  # Of the learner.
    compile_loss: bool = False  # torch.compile; pays for large networks on a GPU.
    autocast: bool = False  # bfloat16 mixed precision in the learner.

    def __post_init__(self) -> None:
        check.types(self, may_be_infinite=("max_gradient_norm",))
        check.at_least(self, 1, "n_step", "max_replay_size", "min_replay_size", "batch_size", "insert_burst")
        check.at_least(self, 1, "importance_sampling_steps", "learning_rate_decay_steps")
        check.at_least(self, 1, "target_update_period", "epsilon_decay_steps", "hidden_sizes")
        check.at_least(self, 0, "priority_exponent", "learning_rate", "adam_epsilon", "epsilon_ladder")
        check.above(self, 0, "reward_clip", "samples_per_insert", "max_gradient_norm", "huber_delta")
        check.above(self, 0, "target_update_rate")
        check.ordered(self, "min_replay_size", "max_replay_size")
        check.device(self, "device")
        check.fraction(self, "discount", "importance_sampling_exponent", "learning_rate_end")
        check.fraction(self, "target_update_rate", "epsilon_start", "epsilon_end", "evaluation_epsilon")


class Exploration(nn.Module):
    """Holds the epsilon of the moment, so that it travels with the parameters."""

    epsilon: torch.Tensor

    def __init__(self, epsilon: float):
        super().__init__()
        self.register_buffer("epsilon", torch.tensor(epsilon, dtype=torch.float64))


class DQNNetworks(nn.Module):
    """The variables of DQN: ``q_network`` and ``exploration``."""

    def __init__(self, config: DQNConfig, spec: Any):
        super().__init__()
        action = spec.actions
        if not isinstance(action, dm_specs.DiscreteArray):
            raise ValueError(
                f"DQN needs one discrete action; the action spec is {action!r}. Use an environment "
                "with a Discrete action space, or an agent for continuous actions."
            )
        self.num_actions = int(action.num_values)
        self.action_dtype = action.dtype
        self.q_network = networks.QNetwork(
            spec.observations, self.num_actions, config.hidden_sizes, config.dueling, config.layer_norm
        )
        self.exploration = Exploration(config.epsilon_start)


def _checked(values: torch.Tensor, nets: DQNNetworks) -> torch.Tensor:
    """``values``, if they are ``[N, A]``: too few would fail far from here, too many not at all."""
    if values.ndim != 2 or values.shape[-1] != nets.num_actions:
        raise ValueError(
            f"q_network gave values of shape {tuple(values.shape)}; the action spec needs "
            f"(envs, {nets.num_actions}), one value per action. Fix the network's last layer."
        )
    return values


class DQNPolicy(core.Policy):
    """Greedy but for an env's epsilon.

    Args:
      networks: read at each step, never changed.
      ladder: spreads epsilon over the envs; see ``DQNConfig.epsilon_ladder``.
      epsilon: a fixed epsilon for all envs instead, for evaluation.
    """

    def __init__(self, networks: DQNNetworks, ladder: float = 0.0, epsilon: float | None = None):
        self._networks = networks
        self._ladder = ladder
        self._epsilon = epsilon
        self._random = np.random.default_rng(0)
        self._device = networks.exploration.epsilon.device

    def initial_state(self, batch_size: int) -> Any:
        """Each env's exponent on the ladder, float64[B]; ``()`` if envs are alike.

        It is what an env keeps wherever it is acted for: in a batch of other actors' envs, say.
        """
        if self._ladder == 0.0 or self._epsilon is not None:
            return ()
        return 1.0 + self._ladder * np.arange(batch_size) / max(batch_size - 1, 1)

    @torch.inference_mode()
    def step(self, observation: Any, state: Any) -> tuple[np.ndarray, tuple[()], Any]:
        tensors = networks.as_tensors(observation, self._device)
        values = _checked(self._networks.q_network(tensors), self._networks)
        actions = values.argmax(-1).cpu().numpy().astype(self._networks.action_dtype)
        envs = len(actions)
        epsilon: Any = self._epsilon
        if epsilon is None:
            epsilon = self._networks.exploration.epsilon.item()
            if len(state):
                epsilon = epsilon**state
        explores = self._random.random(envs) < epsilon
        if explores.any():
            random = self._random.integers(self._networks.num_actions, size=envs)
            actions = np.where(explores, random, actions).astype(self._networks.action_dtype)
        return actions, (), state

    def seed(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def save(self) -> dict[str, Any]:
        return dict(self._random.bit_generator.state)

    def restore(self, state: dict[str, Any]) -> None:
        self._random.bit_generator.state = state


def make_loss(config: DQNConfig) -> Any:
    """The loss function of DQN on a ``ReplaySample`` of ``Transition``s."""

    def loss_fn(nets: DQNNetworks, batch: Any, context: LossContext) -> LossOutput:
        data = batch.data
        rewards = data.reward.float()
        if config.reward_clip is not None:
            rewards = rewards.clamp(-config.reward_clip, config.reward_clip)
        # The adder left one factor out of the n-step discount, so that it is put in here.
        discounts = config.discount * data.discount.float()
        values = _checked(nets.q_network(data.observation), nets)
        with torch.no_grad():
            next_values = context.targets["q_network"](data.next_observation)
            selector = nets.q_network(data.next_observation) if config.double else None
        if selector is None:
            errors = losses.q_learning_errors(values, data.action, rewards, discounts, next_values)
        else:
            errors = losses.double_q_errors(values, data.action, rewards, discounts, next_values, selector)
        each = losses.huber(errors, config.huber_delta)
        metrics = {"q_mean": values.mean(), "td_error": errors.abs().mean()}
        priorities = None
        if config.prioritized:
            start = config.importance_sampling_exponent
            progress = (context.steps / config.importance_sampling_steps).clamp(max=1.0)
            exponent = start + (1.0 - start) * progress
            weights = losses.importance_weights(
                batch.info.probability, batch.info.table_size, exponent, context.largest
            )
            each = weights * each
            metrics["importance_weight"] = weights.mean()
            # The small constant keeps items with no error at all within reach.
            priorities = errors.detach().abs().double() + 1e-6
        return LossOutput(each.mean(), metrics, priorities)

    return loss_fn


class DQN(core.Agent):
    """Deep Q-learning for one discrete action per env.

    ::

        agent = DQN(DQNConfig(n_step=3, prioritized=True))
        program = programs.make_program(agent, environment_factory, programs.RunConfig(num_actors=2))
    """

    def __init__(self, config: DQNConfig | None = None):
        self.config = config or DQNConfig()

    def for_learner(self, rank: int, num_learners: int) -> DQN:
        if num_learners == 1:
            return self
        return DQN(distributed.shard(self.config, rank, num_learners))

    def make_networks(self, spec: Any) -> DQNNetworks:
        """Initial parameters come from torch's global generator, which the program seeds."""
        return DQNNetworks(self.config, spec)

    def make_policy(self, networks: DQNNetworks, evaluation: bool = False) -> DQNPolicy:
        if evaluation:
            return DQNPolicy(networks, epsilon=self.config.evaluation_epsilon)
        return DQNPolicy(networks, ladder=self.config.epsilon_ladder)

    def make_tables(self, spec: Any) -> list[Any]:
        from framework import replay, transition_replay

        config = self.config
        sampler: Any = replay.selectors.Uniform()
        if config.prioritized:
            sampler = replay.selectors.Prioritized(config.priority_exponent)
        table = transition_replay.make_table(
            sampler,
            max_size=config.max_replay_size,
            min_size=config.min_replay_size,
            batch_size=config.batch_size,
            samples_per_insert=config.samples_per_insert,
            burst=config.insert_burst,
        )
        return [table]

    def make_adder(self, client: Any, spec: Any) -> Any:
        from framework import transition_replay

        n_step, discount, burst = self.config.n_step, self.config.discount, self.config.insert_burst
        return transition_replay.make_adder(client, spec, n_step=n_step, discount=discount, burst=burst)

    def make_dataset(self, client: Any) -> Any:
        from framework import transition_replay

        return transition_replay.make_dataset(client, self.config.batch_size, self.config.device)

    def make_learner(self, networks: DQNNetworks, spec: Any) -> learners.SGDLearner:
        config = self.config
        epsilon = schedules.linear(config.epsilon_start, config.epsilon_end, config.epsilon_decay_steps)
        return learners.SGDLearner(
            networks,
            make_loss(config),
            functools.partial(learners.Adam, lr=config.learning_rate, eps=config.adam_epsilon),
            learning_rate_schedule=schedules.linear_decay(
                config.learning_rate_decay_steps, config.learning_rate_end
            ),
            max_gradient_norm=config.max_gradient_norm,
            target_names=("q_network",),
            target_update_period=config.target_update_period,
            target_update_rate=config.target_update_rate,
            after_step=lambda nets, steps: nets.exploration.epsilon.fill_(epsilon(steps)),
            device=config.device,
            compile_loss=config.compile_loss,
            autocast_dtype=torch.bfloat16 if config.autocast else None,
        )


PRESETS: Mapping[str, Preset] = {
    # 500 of 500, greedy over 100 episodes, at 50,000 steps on each of seeds 1 to 5.
    "gymnasium:CartPole-v1": Preset(
        agent={
            "samples_per_insert": 24.0,
            "learning_rate_decay_steps": 9_300,  # 50,000 env steps
        },
        run={
            "envs_per_actor": 4,
            "max_env_steps": 100_000,
            "target_return": 475.0,
            "evaluate_period": 2_000,
        },
    ),
    # 14.1 to 19.0, greedy over 100 episodes, at 1,000,000 steps on seeds 1 to 5.
    "minatar:Breakout": Preset(
        agent={
            "n_step": 3,
            "batch_size": 32,
            "samples_per_insert": 4.0,  # A learner step for every 8 env steps; the paper's is 32.
            "insert_burst": 64,
            "min_replay_size": 5_000,
            "learning_rate": 3e-4,
            "learning_rate_decay_steps": 125_000,  # 1,000,000 env steps
            "learning_rate_end": 0.1,
            "target_update_rate": 0.01,
            "epsilon_decay_steps": 12_000,
            "hidden_sizes": (),  # The convolution has a layer of 128 behind it.
        },
        run={
            "num_actors": 1,
            "envs_per_actor": 8,
            "max_env_steps": 1_000_000,
            "evaluate_period": 50_000,
            "learner_log_period": 1_000,
        },
    ),
}
