"""SAC: soft actor-critic (Haarnoja et al., 2018), for actions of real numbers and for discrete ones.

The policy earns reward and entropy; how much the entropy weighs, the *temperature*, is learned so that the
policy keeps a chosen entropy (Haarnoja et al., 2018b). Each of two critics learns from the smaller of their
target networks (Fujimoto et al., 2018). With one discrete action (Christodoulou, 2019) the expectations over
actions are exact sums instead of samples; nothing else differs.

One learner step is one gradient of one sum of losses: each loss has parameters of its own, so that this is
the same as three optimizers. Until ``min_replay_size`` items are there actions are uniformly random; the
learner publishes the end of that beside the parameters, since a policy has no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
class SACConfig:
    """Settings of SAC. A *learner step* is one batch; an *item* is one n-step transition."""

    # What is learned from.
    discount: float = 0.99  # Per env step. Higher looks further ahead, and learns slower.
    n_step: int = 1  # Rewards summed before bootstrapping. More passes rewards on faster, off-policy.
    reward_scale: float = 1.0  # Rewards are multiplied by this in the learner; more weighs entropy less.

    # Replay.
    max_replay_size: int = 1_000_000  # Items kept; the oldest go first.
    min_replay_size: int = 1_000  # Items there before learning begins.
    batch_size: int = 256  # Items per learner step.
    updates_per_step: float = 1.0  # Learner steps per env step. More learns from less data, slower.
    insert_burst: int = 32  # Items that actors may be ahead or behind of it; each has as many on its way.

    # Learning.
    actor_learning_rate: float = 3e-4  # Of Adam, for the policy.
    critic_learning_rate: float = 1e-3  # And for the critics.
    learning_rate_decay_steps: int | None = None  # Learner steps until all have fallen to 0; None keeps them.
    max_gradient_norm: float | None = None  # Larger gradients, of all parameters, are scaled down to this.
    num_critics: int = 2  # The smallest value counts: more are more careful, and slower.
    target_update_rate: float = 0.005  # How far target critics move towards the critics at each step.
    actor_delay: int = 1  # Learner steps per step of the policy and of the temperature.

    # Entropy.
    temperature: float | None = None  # A fixed weight of the entropy; None learns it.
    initial_temperature: float = 1.0  # Where learning it begins.
    temperature_learning_rate: float = 1e-3  # Of Adam, for its logarithm.
    target_entropy: float | None = None  # In nats, see ``target_entropy``; None is that function's choice.
    random_start: bool = True  # Acts uniformly at random until learning begins, not with the first policy.

    # Networks and device.
    hidden_sizes: tuple[int, ...] = (256, 256)  # Hidden layers of the policy and of each critic.
    layer_norm: bool = False  # Normalises the critics' hidden layers: steadier with many updates per step.
    device: str = "cpu"  # Of the learner.
    compile_loss: bool = False  # torch.compile; pays for large networks on a GPU.
    autocast: bool = False  # bfloat16 mixed precision in the learner.

    def __post_init__(self) -> None:
        check.types(self, may_be_infinite=("max_gradient_norm",))
        check.at_least(self, 1, "n_step", "max_replay_size", "min_replay_size", "batch_size", "insert_burst")
        check.at_least(self, 1, "learning_rate_decay_steps", "num_critics", "actor_delay", "hidden_sizes")
        check.at_least(self, 0, "actor_learning_rate", "critic_learning_rate", "temperature_learning_rate")
        check.above(self, 0, "reward_scale", "updates_per_step", "max_gradient_norm")
        check.above(self, 0, "temperature", "initial_temperature", "target_update_rate")
        check.ordered(self, "min_replay_size", "max_replay_size")
        check.device(self, "device")
        check.fraction(self, "discount", "target_update_rate")


class Policy(nn.Module):
    """Observation ``[..., *]`` to a ``SquashedGaussian`` or ``Categorical`` over ``head_spec``."""

    def __init__(self, config: SACConfig, spec: Any, head_spec: Any):
        super().__init__()
        self.encoder = networks.ObservationEncoder(spec.observations)
        self.body = networks.MLP(self.encoder.output_size, config.hidden_sizes)
        self.head = networks.make_policy_head(self.body.output_size, head_spec, squash=True)

    def forward(self, observation: Any) -> Any:
        return self.head(self.body(self.encoder(observation)))


class DiscreteCritics(nn.Module):
    """Values of all A actions by several critics: observation ``[..., *]`` to ``[count, ..., A]``."""

    def __init__(self, config: SACConfig, spec: Any):
        super().__init__()
        self.members = nn.ModuleList(
            networks.QNetwork(
                spec.observations,
                int(spec.actions.num_values),
                config.hidden_sizes,
                layer_norm=config.layer_norm,
            )
            for _ in range(config.num_critics)
        )

    def forward(self, observation: Any) -> torch.Tensor:
        return torch.stack([member(observation) for member in self.members])


class Temperature(nn.Module):
    """Weight of the entropy, by its logarithm: a parameter if it is learned."""

    def __init__(self, config: SACConfig):
        super().__init__()
        value = config.initial_temperature if config.temperature is None else config.temperature
        self.log = nn.Parameter(torch.tensor(math.log(value)), requires_grad=config.temperature is None)


class Exploration(nn.Module):
    """Whether actions are uniformly random, so that it travels with the parameters."""

    uniform: torch.Tensor

    def __init__(self, uniform: bool):
        super().__init__()
        self.register_buffer("uniform", torch.tensor(uniform))


class SACNetworks(nn.Module):
    """The variables of SAC: ``policy``, ``critics``, ``temperature`` and ``exploration``.

    Policy and critics are about the numbers that there is a choice of: actions flattened to ``[N, D]``, those
    left out whose bounds are equal.
    """

    centre: torch.Tensor
    scale: torch.Tensor
    free: torch.Tensor

    def __init__(self, config: SACConfig, spec: Any):
        super().__init__()
        action = spec.actions
        self.discrete = isinstance(action, dm_specs.DiscreteArray)
        bounded = isinstance(action, dm_specs.BoundedArray) and np.issubdtype(action.dtype, np.floating)
        if not (self.discrete or (bounded and (action.minimum < action.maximum).any())):
            raise ValueError(
                "SAC needs one discrete action, or bounded real numbers to choose from; the action spec is "
                f"{action!r}. Wrap the environment, or use an agent for such actions."
            )
        self._action = action
        self.target_entropy = target_entropy(config, action)
        if self.discrete:
            self.policy = Policy(config, spec, action)
            self.critics: nn.Module = DiscreteCritics(config, spec)
        else:
            low, high = _flat_bounds(action)
            self._free = free = np.flatnonzero(low < high)
            self._every, self._constants = len(free) == len(low), low
            low, high = low[free], high[free]
            head_spec = dm_specs.BoundedArray(free.shape, action.dtype, low, high)
            self.policy = Policy(config, spec, head_spec)
            # Not persistent: they follow from the spec.
            self.register_buffer("free", torch.tensor(free), False)
            self.register_buffer("centre", torch.tensor((low + high) / 2, dtype=torch.float32), False)
            self.register_buffer("scale", torch.tensor((high - low) / 2, dtype=torch.float32), False)
            self.critics = networks.Critics(
                spec.observations,
                len(free),
                config.hidden_sizes,
                config.num_critics,
                layer_norm=config.layer_norm,
            )
        self.temperature = Temperature(config)
        self.exploration = Exploration(config.random_start)

    def drawn(self, action: torch.Tensor) -> torch.Tensor:
        """Actions of the environment ``[N, *shape]`` to those that the policy is about, ``[N, D]``."""
        flat = action.reshape(len(action), -1)
        return flat if self._every else flat[:, self.free]

    def normalized(self, drawn: torch.Tensor) -> torch.Tensor:
        """Actions ``[N, D]`` between their bounds to [-1, 1], which is what the critics see."""
        return (drawn.float() - self.centre) / self.scale

    def as_actions(self, drawn: torch.Tensor) -> np.ndarray:
        """What the environment takes: within the bounds, where rounding may have left them by a little."""
        array = drawn.cpu().numpy().astype(self._action.dtype)
        if self.discrete:
            return array
        if not self._every:
            chosen, array = array, np.tile(self._constants, (len(array), 1))
            array[:, self._free] = chosen
        return array.reshape(-1, *self._action.shape).clip(self._action.minimum, self._action.maximum)


def _flat_bounds(action_spec: Any) -> list[np.ndarray]:
    """The lowest and the highest of each number of the action, flattened."""
    bounds = (action_spec.minimum, action_spec.maximum)
    return [np.broadcast_to(bound, action_spec.shape).ravel() for bound in bounds]


def target_entropy(config: SACConfig, action_spec: Any) -> float:
    """The entropy in nats that the learned temperature keeps, in the environment's units of action.

    Of D real numbers: ``config.target_entropy`` (by default -D, as in the paper) is that of actions in
    [-1, 1]; wider bounds add the logarithm of their width, so that the choice means the same everywhere.
    Numbers whose bounds are equal do not count. Of A discrete actions: by default half of the largest
    possible, log A.
    """
    if isinstance(action_spec, dm_specs.DiscreteArray):
        if config.target_entropy is not None:
            return config.target_entropy
        return 0.5 * math.log(int(action_spec.num_values))
    low, high = _flat_bounds(action_spec)
    half_width = (high - low)[low < high] / 2
    wanted = -float(len(half_width)) if config.target_entropy is None else config.target_entropy
    return wanted + float(np.log(half_width).sum())


class SACPolicy(core.Policy):
    """Draws actions from the policy network, or takes its mode if ``greedy``.

    Args:
      networks: read at each step, never changed.
      greedy: for evaluation; never random, also not at the start.
    """

    def __init__(self, networks: SACNetworks, greedy: bool = False):
        self._networks = networks
        self._greedy = greedy
        self._device = next(networks.policy.parameters()).device
        self._generator = torch.Generator(self._device).manual_seed(0)

    def initial_state(self, batch_size: int) -> tuple[()]:
        return ()

    @torch.inference_mode()
    def step(self, observation: Any, state: Any) -> tuple[np.ndarray, tuple[()], Any]:
        nets = self._networks
        distribution = nets.policy(networks.as_tensors(observation, self._device))
        if self._greedy:
            actions = distribution.mode()
        else:
            actions = distribution.sample(self._generator)
            if nets.exploration.uniform:
                actions = self._uniform(actions, distribution)
        return nets.as_actions(actions), (), state

    def _uniform(self, actions: torch.Tensor, distribution: Any) -> torch.Tensor:
        if self._networks.discrete:
            count = distribution.logits.shape[-1]
            return torch.randint(count, actions.shape, generator=self._generator, device=self._device)
        noise = torch.rand(actions.shape, generator=self._generator, device=self._device)
        return self._networks.centre + self._networks.scale * (2.0 * noise - 1.0)

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def save(self) -> torch.Tensor:
        return self._generator.get_state()

    def restore(self, state: torch.Tensor) -> None:
        self._generator.set_state(state.cpu())


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """Gradients pass through ``module`` to its inputs, and not to its parameters."""
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)


def make_loss(config: SACConfig) -> Any:
    """The loss function of SAC on a ``ReplaySample`` of ``Transition``s."""

    def drawn(nets: SACNetworks, observation: Any, context: LossContext) -> tuple[torch.Tensor, torch.Tensor]:
        policy = nets.policy(observation)
        return policy.rsample_with_log_prob(noise=context.normal_like(policy.base.mean))

    def continuous(nets: SACNetworks, data: Any, context: LossContext) -> tuple[Any, ...]:
        temperature = nets.temperature.log.exp()
        with torch.no_grad():
            next_action, next_log_prob = drawn(nets, data.next_observation, context)
            next_values = context.targets["critics"](data.next_observation, nets.normalized(next_action))
            next_soft = losses.soft_value(next_values.amin(0), next_log_prob, temperature)
        values = nets.critics(data.observation, nets.normalized(nets.drawn(data.action)))
        if not _actor_is_due(config, context):
            return values, next_soft, None, None
        action, log_prob = drawn(nets, data.observation, context)
        with _frozen(nets.critics):
            own_values = nets.critics(data.observation, nets.normalized(action)).amin(0)
        return values, next_soft, losses.sac_actor_loss(log_prob, own_values, temperature), log_prob

    def discrete(nets: SACNetworks, data: Any, context: LossContext) -> tuple[Any, ...]:
        temperature = nets.temperature.log.exp()
        with torch.no_grad():
            next_values = context.targets["critics"](data.next_observation).amin(0)
            next_logits = nets.policy(data.next_observation).logits
            next_soft = losses.discrete_soft_value(next_values, next_logits, temperature)
        all_values = nets.critics(data.observation)
        taken = data.action.long().expand(len(all_values), -1).unsqueeze(-1)
        values = all_values.gather(-1, taken).squeeze(-1)
        if not _actor_is_due(config, context):
            return values, next_soft, None, None
        distribution = nets.policy(data.observation)
        actor = losses.sac_discrete_actor_loss(distribution.logits, all_values.amin(0), temperature)
        return values, next_soft, actor, -distribution.entropy()

    def loss_fn(nets: SACNetworks, batch: Any, context: LossContext) -> LossOutput:
        data = batch.data
        rewards = config.reward_scale * data.reward.float()
        # The adder left one factor out of the n-step discount, so that it is put in here.
        discounts = config.discount * data.discount.float()
        parts = discrete if nets.discrete else continuous
        values, next_soft, actor, log_probs = parts(nets, data, context)
        critic = losses.sac_critic_loss(values, rewards, discounts, next_soft)
        metrics = {
            "critic_loss": critic,
            "q_mean": values.mean(),
            "q_spread": values.std(0, correction=0).mean(),
            "temperature": nets.temperature.log.exp(),
        }
        if actor is None:
            return LossOutput(critic, metrics)
        metrics["actor_loss"] = actor
        metrics["entropy"] = -log_probs.mean()
        total = critic + actor
        if config.temperature is None:
            total = total + losses.sac_temperature_loss(nets.temperature.log, log_probs, nets.target_entropy)
        return LossOutput(total, metrics)

    return loss_fn


def _actor_is_due(config: SACConfig, context: LossContext) -> bool:
    # A delay of 1 never looks at the count, which may lie on a GPU.
    return config.actor_delay == 1 or int(context.steps) % config.actor_delay == 0


class SAC(core.Agent):
    """Soft actor-critic.

    ::

        agent = SAC(SACConfig(updates_per_step=2.0))
        config = programs.RunConfig(max_env_steps=20_000)
        program = programs.make_program(agent, "gymnasium:Pendulum-v1", config)
    """

    def __init__(self, config: SACConfig | None = None):
        self.config = config or SACConfig()

    def for_learner(self, rank: int, num_learners: int) -> SAC:
        if num_learners == 1:
            return self
        return SAC(distributed.shard(self.config, rank, num_learners))

    def make_networks(self, spec: Any) -> SACNetworks:
        """Initial parameters come from torch's global generator, which the program seeds."""
        return SACNetworks(self.config, spec)

    def make_policy(self, networks: SACNetworks, evaluation: bool = False) -> SACPolicy:
        return SACPolicy(networks, greedy=evaluation)

    def make_tables(self, spec: Any) -> list[Any]:
        from framework import replay, transition_replay

        config = self.config
        table = transition_replay.make_table(
            replay.selectors.Uniform(),
            max_size=config.max_replay_size,
            min_size=config.min_replay_size,
            batch_size=config.batch_size,
            samples_per_insert=config.updates_per_step * config.batch_size,
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

    def make_learner(self, networks: SACNetworks, spec: Any) -> learners.SGDLearner:
        config = self.config

        def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
            groups = [
                {"params": list(networks.policy.parameters()), "lr": config.actor_learning_rate},
                {"params": list(networks.critics.parameters()), "lr": config.critic_learning_rate},
            ]
            if config.temperature is None:
                rate = config.temperature_learning_rate
                groups.append({"params": [networks.temperature.log], "lr": rate})
            return learners.Adam(groups)

        def after_step(nets: SACNetworks, steps: int) -> None:
            nets.exploration.uniform.fill_(config.random_start and steps == 0)

        return learners.SGDLearner(
            networks,
            make_loss(config),
            make_optimizer,
            learning_rate_schedule=schedules.linear_decay(config.learning_rate_decay_steps),
            max_gradient_norm=config.max_gradient_norm,
            target_names=("critics",),
            target_update_rate=config.target_update_rate,
            after_step=after_step,
            device=config.device,
            seed=int(torch.randint(2**31, ())),  # From the global generator, as the first parameters.
            compile_loss=config.compile_loss,
            autocast_dtype=torch.bfloat16 if config.autocast else None,
            partial_gradients=config.actor_delay > 1,
        )


PRESETS: Mapping[str, Preset] = {
    # -157.9 to -160.7, greedy over 100 episodes, at 20,000 steps on seeds 1 to 5.
    "gymnasium:Pendulum-v1": Preset(
        agent={
            "min_replay_size": 500,
            "batch_size": 128,
            "hidden_sizes": (64, 64),
            "actor_learning_rate": 1e-3,
            "critic_learning_rate": 2e-3,
        },
        run={"num_actors": 1, "envs_per_actor": 1, "max_env_steps": 20_000, "evaluate_period": 5_000},
    ),
    # 7,951 to 8,400, greedy over 100 episodes, at 200,000 steps on seeds 1 to 3.
    "gymnasium:HalfCheetah-v5": Preset(
        agent={"min_replay_size": 5_000, "batch_size": 128},
        run={"num_actors": 1, "envs_per_actor": 1, "max_env_steps": 200_000, "evaluate_period": 20_000},
    ),
}
