"""PPO: proximal policy optimization with the clipped objective or an adaptive KL penalty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import tree

from framework import adders, learners, losses, networks
from framework import config_checks as check
from framework.learners import LossContext, LossOutput, Prepared, schedules
from framework.replay import ReplaySample
from framework.replay.contracts import ReplayClient
from framework.runs.presets import ATARI_2015_RUN, CONTROL_RUN, HERE, MUJOCO, Preset
from framework.specs import EnvironmentSpec
from framework.torch_agents import ActorCriticConfig, MinibatchAgent, TorchPolicy
from framework.types import Nest, Step


@dataclass(frozen=True)
class PPOConfig(ActorCriticConfig):
    """Settings of PPO, in addition to `ActorCriticConfig`'s.

    A learner step uses one unroll of every env of the program, `epochs` times.
    """

    # Data.
    max_policy_lag: int = 0  # Learner steps by which actors may be behind: 0 waits, 1 acts while learning.
    episodes_per_batch: int | None = None  # Whole episodes of at most `unroll_length` steps. None: unrolls.

    # Targets.
    normalize_observations: bool = False  # Scales observations to mean 0, variance 1 by running statistics.
    normalize_rewards: bool = False  # Scales rewards so that returns have variance 1; keeps the mean.
    normalize_advantages: bool = True  # Scales advantages to mean 0 and variance 1 over a batch.

    # Objective.
    clip: float = 0.2  # Probability ratios are clipped to 1 +- this.
    clip_end: float = 1.0  # Clip after `learning_rate_decay`, as a fraction of `clip`.
    target_kl: float | None = None  # In nats. Uses a KL penalty that adapts to this divergence, not the clip.
    initial_kl_coefficient: float = 1.0  # Initial weight of that penalty.
    value_clip: float | None = None  # Values move at most this far (in units of the return) per batch.
    entropy_coefficient: float = 0.0  # Weight of the policy's entropy in nats. Higher values explore longer.
    entropy_end: float = 1.0  # That weight after `learning_rate_decay`, as a fraction of it.

    # Optimization.
    epochs: int = 10  # Passes over a batch. More learn more from it, until the policy moves too far.
    minibatch_size: int | None = 64  # Approximate number of real steps in a minibatch. None: the whole batch.
    learning_rate: float = 3e-4  # Initial learning rate of Adam.
    value_learning_rate: float | None = None  # Learning rate of the value's layers. None: `learning_rate`.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 0, "max_policy_lag", "initial_kl_coefficient")
        check.at_least(self, 1, "epochs", "minibatch_size", "episodes_per_batch")
        check.at_least(self, 0, "value_learning_rate")
        check.above(self, 0, "target_kl", "value_clip")
        check.fraction(self, "clip_end", "entropy_end")
        check.between(self, 0, 1, "clip")


class PPONetworks(networks.ActorCritic):
    """The variables of PPO. The methods expect observations that `normalizer` has scaled."""

    kl_coefficient: torch.Tensor

    def __init__(self, config: PPOConfig, spec: EnvironmentSpec):
        super().__init__(spec, **config.network_settings())
        self.normalizer = networks.ObservationNormalizer(spec.observations, config.normalize_observations)
        self.reward_scale = networks.RewardScale()
        # State of the learner, which acting does not need.
        self.register_buffer("kl_coefficient", torch.tensor(config.initial_kl_coefficient))


# How the names of children begin that acting does not need.
_LEARNER_ONLY = ("reward_scale", "cost_scale", "value_")


class PPOPolicy(TorchPolicy):
    """Samples from the policy's distribution, or takes its mode.

    Extras of each step: the parameters of the distribution (`policy`), the `version` of the networks'
    parameters, the unclipped `action` if some of it is continuous, and with a memory its `state` before the
    step.

    Args:
      networks: the networks, which the policy reads at each step.
      evaluation: whether to take the mode.
    """

    def __init__(self, networks: PPONetworks, evaluation: bool = False):
        names = [name for name, _ in networks.named_children() if not name.startswith(_LEARNER_ONLY)]
        super().__init__(networks, networks.actions, variables=tuple(names))
        self._initial_state, self._act = networks.initial_state, networks.act
        self._greedy = evaluation

    @torch.inference_mode()
    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        return self._initial_state(batch_size)

    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        distribution, next_state = self._act(observation, state)
        drawn = distribution.mode() if self._greedy else distribution.sample(self.random)
        extras: dict[str, Nest] = {
            "policy": self.actions.parameters(distribution),
            "version": self.versions(drawn),
        }
        if self.actions.continuous:
            extras["action"] = drawn
        if state:
            extras["state"] = state
        return drawn, extras, next_state


class Rows(NamedTuple):
    """The data of minibatches: `[M, ...]` real steps, or `[N, T, ...]` unrolls with a memory."""

    observation: Any  # normalized
    action: torch.Tensor
    policy: dict[str, torch.Tensor]  # that acted
    log_prob: torch.Tensor  # of the action under it
    value: torch.Tensor  # before the update
    advantage: torch.Tensor
    target: torch.Tensor  # of the value
    mask: torch.Tensor | tuple[()]  # () where all rows are real
    starts: torch.Tensor | tuple[()]
    state: tuple[torch.Tensor, ...]  # [N, ...], before the first row

    @property
    def counted(self) -> torch.Tensor | None:
        """The mask; None where all rows are real."""
        return self.mask if isinstance(self.mask, torch.Tensor) else None


class PPO(MinibatchAgent):
    """Proximal policy optimization for discrete and continuous actions, with or without a memory.

    ```python
    agent = PPO(PPOConfig(unroll_length=64))
    config = programs.RunConfig(num_actors=2, envs_per_actor=8)
    program = programs.make_program(agent, environment_factory, config)
    ```
    """

    config: PPOConfig = PPOConfig()
    memory_field = "recurrent"
    takes_action_masks = True

    @property
    def max_policy_lag(self) -> int:
        return self.config.max_policy_lag

    @property
    def episodes_per_batch(self) -> int | None:
        return self.config.episodes_per_batch

    @property
    def carries_returns(self) -> bool:
        """Whether the running returns before each unroll are stored with it. A whole episode has none."""
        return self.config.normalize_rewards and self.config.episodes_per_batch is None

    @property
    def extras_of_first_row(self) -> tuple[str, ...]:
        return (*super().extras_of_first_row, *[adders.RUNNING_RETURN] * self.carries_returns)

    def make_networks(self, spec: EnvironmentSpec) -> PPONetworks:
        parts = ("actions", "normalizer", "reward_scale", "kl_coefficient")
        return self.custom_networks(spec, PPONetworks, (*parts, "initial_state", "act", "forward"))

    def make_adder(self, client: ReplayClient, spec: EnvironmentSpec) -> adders.Adder:
        adder = super().make_adder(client, spec)
        if not self.carries_returns:
            return adder
        return adders.RunningReturnAdder(
            adder, self.config.discount, spec.rewards, reward_clip=self.config.reward_clip
        )

    def make_policy(self, networks: PPONetworks, evaluation: bool = False) -> PPOPolicy:
        return PPOPolicy(networks, evaluation)

    def make_optimizer(self, networks: PPONetworks) -> torch.optim.Optimizer:
        """Adam, with a rate of its own for the children whose names begin with `value_`, if there is one."""
        config = self.config
        groups = learners.with_own_rate(networks, "value_", config.value_learning_rate, "value_learning_rate")
        return learners.Adam(groups, lr=config.learning_rate, eps=config.adam_epsilon)

    def prepare(self, networks: PPONetworks, batch: ReplaySample, context: LossContext) -> Prepared:
        """Values, advantages and targets of unrolls `[N, T + 1]`, whose last row is for bootstrapping."""
        config, data = self.config, batch.data
        mask = losses.transition_mask(data.mask)
        starts = data.start_of_episode.float().clone()
        starts[:, 0] = 0.0  # its state is stored, whether an episode begins there or not
        rewards = self.scaled_rewards(networks, data, context, starts, mask)
        observation = self.observations(networks, data)
        state = data.extras.get("state", ())
        if config.episodes_per_batch is not None:
            state = tree.map_structure(lambda leaf: leaf[:, 0], state)  # Episodes have each row's.
        _, values = networks(observation, state, starts)
        discounts = config.discount * data.discount.float()
        advantages, targets, metrics = self.estimates(networks, rewards, discounts, values, mask)
        scaled = advantages
        if config.normalize_advantages:
            scaled = losses.normalize_advantages(advantages, mask, total=context.total)
        actions, policy = networks.actions.drawn(data), data.extras["policy"]
        log_probs = networks.actions.distribution(policy).log_prob(actions)
        rows = Rows(observation, actions, policy, log_probs, values, scaled, targets, mask, starts, state)
        if config.recurrent is None:
            real = mask.flatten().nonzero().squeeze(-1)
            rows = rows._replace(mask=(), starts=())
            rows = tree.map_structure(lambda leaf: leaf.flatten(0, 1)[real], rows)
        staleness = losses.masked_mean(context.learner_steps - data.extras["version"].float(), mask)
        return Prepared(rows, int(mask.sum()), {"staleness": staleness, **metrics})

    def observations(self, networks: PPONetworks, data: Step) -> Nest:
        """What the networks take of rows `[N, T + 1]`."""
        return networks.normalizer(data.observation)

    def scaled_rewards(self, networks: PPONetworks, data: Step, context: LossContext, *rows: Any) -> Any:
        """The rewards `[N, T + 1]`, scaled if the config says so; `rows` are the starts and the mask."""
        before = data.extras.get(adders.RUNNING_RETURN)
        return self.scaled(networks.reward_scale, self.rewards(data), before, context, *rows)

    def scaled(self, scale: Any, rewards: Any, before: Any, context: LossContext, *rows: Any) -> torch.Tensor:
        if self.config.normalize_rewards:
            scale.update(rewards, *rows, self.config.discount, context.total, before)
            rewards = scale(rewards)
        return rewards

    def estimates(
        self, networks: PPONetworks, rewards: Any, discounts: Any, values: Any, mask: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Advantages `[N, T + 1]` of the policy, targets of the values, and metrics."""
        advantages = losses.generalized_advantages(rewards, discounts, values, mask, self.config.gae_lambda)
        targets = values + advantages
        explained = losses.explained_variance(values, targets, mask)
        metrics = {"explained_variance": explained, "value_target": losses.masked_mean(targets, mask)}
        return advantages, targets, metrics

    def value_loss(self, values: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Half the squared error of the values of a minibatch."""
        clip, mask = self.config.value_clip, rows.counted
        if clip is None:
            return losses.value_loss(values, rows.target, mask)
        return losses.clipped_value_loss(values, rows.value, rows.target, mask, clip)

    def loss(self, networks: PPONetworks, rows: Rows, context: LossContext) -> LossOutput:
        """The surrogate, the value's error and the entropy of one minibatch."""
        config, mask = self.config, rows.counted
        new, values = networks(rows.observation, rows.state, rows.starts)
        inputs = new.log_prob(rows.action), rows.log_prob, rows.advantage
        if config.target_kl is None:
            left = schedules.linear_decay(config.learning_rate_decay, config.clip_end)(context.env_steps)
            clip, wanted = config.clip * left, context.wants_metrics
            surrogate = losses.clipped_surrogate(*inputs, mask, clip, statistics=wanted)
        else:
            kl = networks.actions.distribution(rows.policy).kl(new)
            bound = kl, networks.kl_coefficient, config.target_kl
            surrogate = losses.kl_penalty_surrogate(*inputs, *bound, mask, total=context.total)
        value_loss = self.value_loss(values, rows)
        loss = torch.add(surrogate.loss, value_loss, alpha=config.value_coefficient)
        metrics = {"policy_loss": surrogate.loss, "value_loss": value_loss}
        if config.entropy_coefficient != 0.0 or context.wants_metrics:
            with torch.set_grad_enabled(config.entropy_coefficient != 0.0):
                metrics["entropy"] = losses.masked_mean(new.entropy(), mask)
        if config.entropy_coefficient != 0.0:
            left = schedules.linear_decay(config.learning_rate_decay, config.entropy_end)(context.env_steps)
            loss = loss - config.entropy_coefficient * left * metrics["entropy"]
        if context.wants_metrics:
            metrics["clip_fraction"] = surrogate.clip_fraction
        weight = None
        if context.total is not None:
            weight = loss.new_tensor(len(rows.log_prob)) if mask is None else mask.sum()
        return LossOutput(loss, metrics, weight=weight)

    def finish(
        self, networks: PPONetworks, batch: ReplaySample, prepared: Prepared, context: LossContext
    ) -> dict[str, torch.Tensor]:
        """Metrics of the change of the policy. Updates the penalty and the statistics for the next batch."""
        rows, mask = prepared.data, prepared.data.counted
        new, _ = networks(rows.observation, rows.state, rows.starts)
        kl = losses.masked_mean(networks.actions.distribution(rows.policy).kl(new), mask)
        if context.total is not None:
            weighted = context.total(torch.stack([kl * prepared.rows, kl.new_tensor(prepared.rows)]))
            kl = weighted[0] / weighted[1].clamp(min=1.0)
        metrics = {"kl": kl}
        if self.config.target_kl is not None:
            coefficient = networks.kl_coefficient
            coefficient.copy_(losses.adapt_kl_coefficient(coefficient, kl, self.config.target_kl))
            metrics["kl_coefficient"] = coefficient.clone()
        # Last, so that acting and learning used the same normalized observations.
        networks.normalizer.update(batch.data.observation, batch.data.mask > 0, context.total)
        return metrics


_RUN = {"num_actors": 1, "learner_log_period": 10}
_PAPER = "Schulman et al. (2017), table {}"

PRESETS: Mapping[str, Preset] = {
    # 500 of 500, greedy over 100 episodes, at 60,000 steps on seeds 1 to 5.
    "gymnasium:CartPole-v1": Preset(
        agent={
            "unroll_length": 64,
            "epochs": 8,
            "minibatch_size": 128,
            "learning_rate": 1e-3,
            "learning_rate_decay": 60_000,
            "clip_end": 0.1,  # 2 of 9 seeds ended below 490 when it was 1.
            "normalize_rewards": True,  # Values near 70 would saturate the tanh units of the critic.
        },
        run={
            **_RUN,
            "envs_per_actor": 8,
            "max_env_steps": 60_000,
            "target_return": 475.0,
            "evaluate_period": 10_000,
            "num_evaluation_episodes": 100,
        },
    ),
    "gymnasium:Acrobot-v1": Preset(
        agent={
            "unroll_length": 64,
            "epochs": 6,
            "minibatch_size": 128,
            "learning_rate": 1e-3,
            "learning_rate_decay": 200_000,
            "normalize_observations": True,
            "normalize_rewards": True,
            "entropy_coefficient": 0.01,
        },
        run={
            **_RUN,
            "envs_per_actor": 16,
            "max_env_steps": 200_000,
            "evaluate_period": 20_000,
            "num_evaluation_episodes": 100,
        },
    ),
    # Chosen on seeds above 100. With fewer optimizer steps, or a discount of 0.9, the mean of some policies
    # hangs still from some starts, from which only their noise swings up.
    "gymnasium:Pendulum-v1": Preset(
        agent={
            "unroll_length": 128,
            "epochs": 10,
            "minibatch_size": 64,
            "learning_rate": 1e-3,
            "learning_rate_decay": 200_000,
            "discount": 0.95,
            "target_kl": 0.02,
            "normalize_observations": True,
            "normalize_rewards": True,
        },
        run={**_RUN, "envs_per_actor": 16, "max_env_steps": 200_000, "evaluate_period": 20_000},
    ),
    "gymnasium:LunarLander-v3": Preset(
        agent={
            "unroll_length": 128,
            "epochs": 6,
            "minibatch_size": 256,
            "learning_rate": 1e-3,
            "learning_rate_decay": 1_000_000,
            "discount": 0.995,
            "gae_lambda": 0.97,
            "normalize_observations": True,
            "normalize_rewards": True,
            "entropy_coefficient": 0.01,
        },
        run={
            **_RUN,
            "envs_per_actor": 16,
            "max_env_steps": 1_000_000,
            "target_return": 240.0,
            "evaluate_period": 50_000,
        },
    ),
    # Chosen on seeds 102 and 103. With unrolls of 32 and rewards as they are, it keeps falling back from 500.
    "testing:CartPoleWithoutVelocities": Preset(
        agent={
            "unroll_length": 128,
            "minibatch_size": 256,
            "learning_rate": 1e-3,
            "learning_rate_decay": 300_000,
            "clip_end": 0.1,
            "entropy_coefficient": 0.0,
            "hidden_sizes": (64,),
            "normalize_observations": True,
            "normalize_rewards": True,  # Errors of large values would drown the policy.
            "recurrent": "lstm",  # None is a network without memory.
        },
        run={
            **_RUN,
            "envs_per_actor": 8,
            "max_env_steps": 300_000,
            "target_return": 475.0,
            "evaluate_period": 25_000,
        },
    ),
    "testing:Memory": Preset(
        agent={
            "unroll_length": 20,
            "epochs": 4,
            "minibatch_size": 160,
            "learning_rate": 1e-3,
            "learning_rate_decay": 200_000,
            "recurrent": "lstm",
            "entropy_coefficient": 0.01,
        },
        run={
            **_RUN,
            "envs_per_actor": 32,
            "max_env_steps": 200_000,
            "target_return": 0.99,
            "evaluate_period": 20_000,
            "num_evaluation_episodes": 100,
        },
    ),
    # Normalized advantages of a policy that solves it are noise, scaled up: entropy falls below 0.02 and one
    # learner step ruins the policy, for good on 1 of 3 seeds.
    "minigrid:DoorKey-5x5": Preset(
        agent={
            "unroll_length": 32,
            "epochs": 4,
            "minibatch_size": 256,
            "learning_rate": 1e-3,
            "learning_rate_decay": 500_000,
            "entropy_coefficient": 0.01,
            "normalize_advantages": False,
            "hidden_sizes": (64,),
            "recurrent": "lstm",
        },
        run={
            **_RUN,
            "envs_per_actor": 32,
            "wrappers": ("OneHotPlanes",),
            "max_env_steps": 500_000,
            "evaluate_period": 50_000,
            "num_evaluation_episodes": 20,
        },
    ),
    "minatar:*": Preset(
        {
            "discount": 0.999,
            "unroll_length": 128,
            "epochs": 4,
            "minibatch_size": 1_024,
            "learning_rate": 5e-4,
            "entropy_coefficient": 0.01,
            "hidden_sizes": (),  # The convolution, which policy and value share, has a layer of 128 after it.
        },
        {**_RUN, "envs_per_actor": 64, "max_env_steps": 10_000_000, "evaluate_period": 100_000},
        "Lange (2022), gymnax-blines",
        {HERE: "hidden_sizes", "Lange (2022), gymnax-blines": "envs_per_actor"},
    ),
    # The error of the values is the square, of which ours is the half.
    "atari:*": Preset(
        {
            "reward_clip": 1.0,
            "unroll_length": 128,
            "epochs": 3,
            "minibatch_size": 256,
            "learning_rate": 2.5e-4,
            "learning_rate_decay": 10_000_000,
            "clip": 0.1,
            "clip_end": 0.0,
            "value_coefficient": 2.0,
            "entropy_coefficient": 0.01,
            "hidden_sizes": (),  # The convolutions have a layer of 512 after them.
            "shared": True,
        },
        {**ATARI_2015_RUN, **_RUN, "max_env_steps": 10_000_000, "evaluate_period": 500_000},
        _PAPER.format(5),
        {_PAPER.format(5): "envs_per_actor"},
    ),
    **dict.fromkeys(
        (MUJOCO, "dm_control:*"),
        Preset(
            {
                "unroll_length": 2_048,
                "learning_rate_decay": 1_000_000,
                "normalize_observations": True,
                "normalize_rewards": True,
            },
            {**CONTROL_RUN, **_RUN},
            _PAPER.format(3),
            {
                _PAPER.format(3): "envs_per_actor",
                "Huang et al. (2022), the 37 details": "learning_rate_decay "
                "normalize_observations normalize_rewards",
            },
        ),
    ),
}
