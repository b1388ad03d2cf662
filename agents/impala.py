"""IMPALA: an actor-critic that corrects for the age of its data by V-trace (Espeholt et al., 2018).

Actors write unrolls of T steps into a queue and go on with parameters that may be a few learner steps old;
the learner takes batches from the queue, each unroll once. V-trace weighs what the actors' policy mu did by
how likely the learner's policy pi is to do the same. How far the two are apart is logged: ``staleness`` in
learner steps, ``rho_clipped`` and ``c_clipped`` the shares of importance weights that were clipped.

What the actors' policy saw is what is in replay: the last action and the last reward are part of the
observation (a wrapper of the environment puts them there), the log-probability of the action and the state
of the LSTM at the start of each unroll are extras.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tree
from torch import nn

from framework import config_checks as check
from framework import core, learners, losses, networks
from framework.datasets import Dataset
from framework.learners import LossContext, LossOutput, distributed, schedules
from framework.programs.presets import Preset
from framework.types import Nest

_TORSOS: dict[str, Any] = {
    "shallow": networks.ShallowConv,
    "deep": networks.ResidualConv,
    "nature": networks.NatureConv,
}


@dataclass(frozen=True)
class IMPALAConfig:
    """Settings of IMPALA. A *learner step* is one batch; a *step* is one of the environment."""

    # What is learned from.
    discount: float = 0.99  # Per env step. Higher looks further ahead, and learns slower.
    unroll_length: int = 20  # T, steps of an env in an unroll. More bootstraps later; data gets older.
    reward_clip: float | None = None  # Rewards are clipped to +- this in the learner; None keeps them.
    previous_action_and_reward: bool = False  # The policy also sees the last action and (clipped) reward.

    # The queue between actors and learner.
    batch_size: int = 16  # N, unrolls in a learner step: N * T steps of the environment.
    queue_batches: int = 2  # Batches that wait; then actors do. (This - 1) * N must hold an actor's envs.
    prefetch_batches: int = 1  # Batches that the learner's node holds ready beside those.

    # V-trace.
    vtrace_lambda: float = 1.0  # 1 is the paper's; less cuts the variance of long unrolls, and adds bias.
    clip_rho: float = 1.0  # Largest importance weight of an error: higher follows pi further from mu.
    clip_c: float = 1.0  # Largest importance weight in a trace: higher passes rewards back faster, noisily.

    # Loss: the mean over the steps of a batch. (The paper sums them: its gradients are N * T times as large.)
    value_coefficient: float = 0.5  # Weight of half the squared error of the values.
    entropy_coefficient: float = 0.01  # Weight of the policy's entropy. More explores longer.

    # Learning.
    optimizer: str = "rmsprop"  # Or "adam".
    learning_rate: float = 5e-4  # At the start.
    learning_rate_decay_steps: int | None = None  # Learner steps until it has fallen; None keeps it.
    learning_rate_end: float = 0.0  # What is left of it then, as a fraction.
    rmsprop_decay: float = 0.99  # How long RMSprop remembers squared gradients.
    rmsprop_momentum: float = 0.0  # Share of the last update that is made again.
    adam_epsilon: float = 1e-5  # Larger damps steps where gradients are small.
    max_gradient_norm: float | None = 0.5  # Larger gradients are scaled down to this.

    # Networks and device.
    torso: str = "shallow"  # For images: "shallow" or "deep", the paper's two; "nature", that of DQN.
    hidden_sizes: tuple[int, ...] = (64, 64)  # For observations without images: hidden layers.
    activation: str = "tanh"  # Of those: relu, tanh, elu, silu.
    lstm_size: int | None = None  # Width of an LSTM behind the torso; None is a feed-forward network.
    device: str = "cpu"  # Of the learner.
    compile_loss: bool = False  # torch.compile; pays for large networks on a GPU.
    autocast: bool = False  # bfloat16 mixed precision in the learner.
    actor_autocast: bool = False  # bfloat16 mixed precision in the actors; pays for images in batches.

    def __post_init__(self) -> None:
        check.types(self, may_be_infinite=("clip_rho", "clip_c", "max_gradient_norm"))
        check.at_least(self, 2, "unroll_length")
        check.at_least(self, 1, "batch_size", "queue_batches", "hidden_sizes", "lstm_size")
        check.at_least(self, 1, "learning_rate_decay_steps")
        check.at_least(
            self, 0, "prefetch_batches", "clip_rho", "clip_c", "value_coefficient", "entropy_coefficient"
        )
        check.at_least(self, 0, "learning_rate", "rmsprop_momentum", "adam_epsilon")
        check.above(self, 0, "reward_clip", "max_gradient_norm")
        check.device(self, "device")
        check.fraction(self, "discount", "vtrace_lambda", "learning_rate_end", "rmsprop_decay")
        check.one_of(self, ("rmsprop", "adam"), "optimizer")
        check.one_of(self, _TORSOS, "torso")
        check.one_of(self, networks.ACTIVATIONS, "activation")


class ActorCritic(nn.Module):
    """Torso, LSTM (if there is one), and the heads of policy and value."""

    def __init__(self, config: IMPALAConfig, spec: Any):
        super().__init__()
        has_images = any(len(leaf.shape) == 3 for leaf in tree.flatten(spec.observations))
        self.torso = networks.ObservationEncoder(
            spec.observations,
            () if has_images else config.hidden_sizes,
            config.activation,
            _TORSOS[config.torso],
        )
        width = self.torso.output_size
        self.core = None if config.lstm_size is None else networks.RecurrentCore(width, config.lstm_size)
        width = width if config.lstm_size is None else config.lstm_size
        self.policy = networks.make_policy_head(width, networks.Actions(spec.actions).head_spec)
        self.value = nn.Linear(width, 1)

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        """The LSTM's state ``[B, lstm_size]`` at the start of an episode; ``()`` without one."""
        return () if self.core is None else self.core.initial_state(batch_size)

    def step(self, observation: Nest, state: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
        """One step of acting: ``[B, ...]`` to the distribution over actions and the next state."""
        features = self.torso(observation)
        if self.core is not None:
            features, state = self.core.step(features, state)
        return self.policy(features), state

    def unroll(
        self, observation: Nest, state: tuple[torch.Tensor, ...], start_of_episode: torch.Tensor
    ) -> tuple[Any, torch.Tensor]:
        """Sequences ``[N, T + 1, ...]`` to distributions over actions and values, ``[N, T + 1]``.

        The first row goes on from ``state``, which is the initial one where an episode begins there.
        """
        features = self.torso(observation)
        if self.core is not None:
            inside = start_of_episode.clone()
            inside[:, 0] = False
            features, _ = self.core.unroll(features, state, inside)
        return self.policy(features), self.value(features).squeeze(-1)


class Progress(nn.Module):
    """Counts the learner's steps, beside the parameters, so that actors can say how old theirs are."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


class IMPALANetworks(nn.Module):
    """The variables of IMPALA: ``actor_critic`` and ``progress``."""

    def __init__(self, config: IMPALAConfig, spec: Any):
        super().__init__()
        actions = spec.actions
        if tree.is_nested(actions) or not np.issubdtype(actions.dtype, np.integer):
            raise ValueError(
                f"IMPALA needs discrete actions (one, or several independent ones); the action spec is "
                f"{actions!r}. Use an environment with a Discrete or MultiDiscrete action space."
            )
        self.actions = networks.Actions(actions)
        self.actor_critic = ActorCritic(config, spec)
        self.progress = Progress()


class IMPALAPolicy(core.Policy):
    """Draws actions from the policy, or takes the most likely one if ``greedy``.

    Extras of each step: ``log_prob`` of the action, ``learner_steps`` that the parameters had seen, and
    with an LSTM its ``state`` before the step.
    """

    def __init__(self, networks: IMPALANetworks, greedy: bool = False, autocast: bool = False):
        self._networks = networks
        self._greedy = greedy
        self._autocast = autocast
        self._device = networks.progress.steps.device
        self._random = torch.Generator(self._device).manual_seed(0)

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        return self._networks.actor_critic.initial_state(batch_size)

    @torch.inference_mode()
    def step(self, observation: Nest, state: Any) -> tuple[np.ndarray, dict[str, Any], Any]:
        tensors = networks.as_tensors(observation, self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            policy, next_state = self._networks.actor_critic.step(tensors, state)
        actions = policy.mode() if self._greedy else policy.sample(self._random)
        log_probs = policy.log_prob(actions).float().cpu().numpy()
        steps = self._networks.progress.steps.item()
        extras = {"log_prob": log_probs, "learner_steps": np.full(log_probs.shape, steps, np.int64)}
        if state:
            extras["state"] = tuple(part.cpu().numpy() for part in state)
        return self._networks.actions.to_environment(actions.cpu().numpy()), extras, next_state

    def seed(self, seed: int) -> None:
        self._random.manual_seed(seed)

    def save(self) -> torch.Tensor:
        return self._random.get_state()

    def restore(self, state: torch.Tensor) -> None:
        self._random.set_state(state.cpu())


def make_loss(config: IMPALAConfig) -> Any:
    """The loss function of IMPALA on a ``ReplaySample`` of ``Step``s ``[N, T + 1, ...]``."""

    def loss_fn(nets: IMPALANetworks, batch: Any, context: LossContext) -> LossOutput:
        data = batch.data
        rewards = data.reward.float()
        if config.reward_clip is not None:
            rewards = rewards.clamp(-config.reward_clip, config.reward_clip)
        # The state is the actor's, before the first row: the learner's own would need the whole episode.
        state = data.extras.get("state", ())
        policy, values = nets.actor_critic.unroll(data.observation, state, data.start_of_episode)
        log_probs, values = policy.log_prob(nets.actions.drawn(data)).float(), values.float()
        counted = losses.transition_mask(data.mask)
        log_rhos = log_probs - data.extras["log_prob"]
        vtrace = losses.vtrace(
            log_rhos,
            rewards,
            config.discount * data.discount.float(),
            values,
            data.mask,
            config.vtrace_lambda,
            config.clip_rho,
            config.clip_c,
        )
        policy_loss = losses.policy_gradient_loss(log_probs, vtrace.advantages, counted)
        value_loss = losses.value_loss(values, vtrace.targets, counted)
        entropy = losses.masked_mean(policy.entropy().float(), counted)
        loss = policy_loss + config.value_coefficient * value_loss - config.entropy_coefficient * entropy
        with torch.no_grad():
            age = (context.steps - data.extras["learner_steps"]).float()
            metrics = {
                "policy_loss": policy_loss,
                "value_loss": value_loss,
                "entropy": entropy,
                "value_mean": losses.masked_mean(values, counted),
                "rho_clipped": losses.masked_mean(vtrace.clipped, counted),
                "c_clipped": losses.masked_mean((log_rhos.exp() > config.clip_c).float(), counted),
                "staleness": losses.masked_mean(age, counted),
                "staleness_max": (age * counted).max(),
                "transitions": counted.sum(),
            }
        return LossOutput(loss, metrics, weight=counted.sum())

    return loss_fn


class IMPALA(core.Agent):
    """V-trace actor-critic for discrete actions.

    ::

        agent = IMPALA(IMPALAConfig(lstm_size=256, previous_action_and_reward=True))
        config = programs.RunConfig(num_actors=2, envs_per_actor=8)
        program = programs.make_program(agent, environment_factory, config)
    """

    def __init__(self, config: IMPALAConfig | None = None):
        self.config = config or IMPALAConfig()

    def environment_wrappers(self) -> Sequence[Any]:
        """The last action and reward become part of the observation, where the config says so."""
        from framework import environments

        if not self.config.previous_action_and_reward:
            return ()
        return (functools.partial(environments.ObservationActionReward, reward_clip=self.config.reward_clip),)

    def for_learner(self, rank: int, num_learners: int) -> IMPALA:
        if num_learners == 1:
            return self
        config = distributed.shard(self.config, rank, num_learners)
        # What one learner fetches ahead is missing for the others: the queue must have more than that.
        ahead = min(config.prefetch_batches, config.queue_batches)
        return IMPALA(dataclasses.replace(config, prefetch_batches=ahead))

    def make_networks(self, spec: Any) -> IMPALANetworks:
        """Initial parameters come from torch's global generator, which the program seeds."""
        return IMPALANetworks(self.config, spec)

    def make_policy(self, networks: IMPALANetworks, evaluation: bool = False) -> IMPALAPolicy:
        return IMPALAPolicy(networks, greedy=evaluation, autocast=self.config.actor_autocast)

    def make_tables(self, spec: Any) -> list[Any]:
        from framework import replay

        size = self.config.queue_batches * self.config.batch_size
        return [replay.Table.queue("queue", size)]

    def make_adder(self, client: Any, spec: Any) -> Any:
        from framework import adders

        state = () if self.config.lstm_size is None else ("state",)
        return adders.UnrollAdder(client, self.config.unroll_length, extras_of_first_row=state)

    def make_dataset(self, client: Any) -> Any:
        return Dataset(
            client,
            "queue",
            self.config.batch_size,
            device=self.config.device,
            prefetch=self.config.prefetch_batches,
        )

    def make_learner(self, networks: IMPALANetworks, spec: Any) -> learners.SGDLearner:
        config = self.config
        return learners.SGDLearner(
            networks,
            make_loss(config),
            functools.partial(_make_optimizer, config),
            learning_rate_schedule=schedules.linear_decay(
                config.learning_rate_decay_steps, config.learning_rate_end
            ),
            max_gradient_norm=config.max_gradient_norm,
            after_step=lambda nets, steps: nets.progress.steps.fill_(steps),
            device=config.device,
            compile_loss=config.compile_loss,
            autocast_dtype=torch.bfloat16 if config.autocast else None,
        )


def _make_optimizer(config: IMPALAConfig, parameters: Any) -> torch.optim.Optimizer:
    if config.optimizer == "adam":
        return learners.Adam(parameters, lr=config.learning_rate, eps=config.adam_epsilon)
    return torch.optim.RMSprop(
        parameters,
        lr=config.learning_rate,
        alpha=config.rmsprop_decay,
        eps=config.adam_epsilon,
        momentum=config.rmsprop_momentum,
        foreach=True,
    )


PRESETS: Mapping[str, Preset] = {
    # 500 of 500, greedy over 100 episodes, at 150,000 steps on each of seeds 1 to 5.
    "gymnasium:CartPole-v1": Preset(
        agent={
            "optimizer": "adam",
            "learning_rate": 4e-3,
            "learning_rate_decay_steps": 1_170,  # 150,000 env steps
            "unroll_length": 16,
            "batch_size": 8,
            "vtrace_lambda": 0.95,
            "value_coefficient": 0.1,  # Returns go up to 100: their gradient would drown the policy's.
        },
        run={
            "envs_per_actor": 8,
            "max_env_steps": 150_000,
            "evaluate_period": 25_000,
            "publish_period": 1,
            "learner_log_period": 50,
        },
    ),
    # 1.0 at 200,000 steps on each of seeds 1 to 5. Only the last of ten actions is rewarded: a small discount
    # and lambda keep its luck out of the updates of the others.
    "testing:Memory": Preset(
        agent={
            "optimizer": "adam",
            "learning_rate": 5e-3,
            "discount": 0.9,
            "vtrace_lambda": 0.9,
            "hidden_sizes": (32,),
            "lstm_size": 32,  # None, a network without memory, stays at chance, 0.5.
        },
        run={
            "envs_per_actor": 8,
            "max_env_steps": 200_000,
            "target_return": 0.99,
            "evaluate_period": 25_000,
            "num_evaluation_episodes": 100,
            "publish_period": 1,
            "learner_log_period": 50,
        },
    ),
    # 11.8 to 21.0, greedy over 100 episodes, at 2,000,000 steps on seeds 1 to 5. Many small batches: with
    # those of 320 steps, at a rate of 2e-3, some seeds stay at 6 for a million steps and more.
    "minatar:Breakout": Preset(
        agent={
            "optimizer": "adam",
            "learning_rate": 7e-4,
            "learning_rate_decay_steps": 25_000,  # 2,000,000 env steps
            "learning_rate_end": 0.05,
            "discount": 0.97,
            "unroll_length": 10,
            "batch_size": 8,
            "vtrace_lambda": 0.95,
            "value_coefficient": 0.25,
            "entropy_coefficient": 0.02,
        },
        run={
            "envs_per_actor": 8,
            "max_env_steps": 2_000_000,
            "evaluate_period": 100_000,
            "publish_period": 1,
            "learner_log_period": 50,
        },
    ),
    # The paper sums its loss over a batch: epsilon and norm are its 0.01 and 40, divided by 320 steps.
    "atari:Pong": Preset(
        agent={
            "learning_rate": 4.8e-4,
            "learning_rate_decay_steps": 31_250,  # 10,000,000 env steps
            "adam_epsilon": 3e-5,
            "max_gradient_norm": 0.125,
            "torso": "nature",
            "unroll_length": 40,
            "batch_size": 8,
            "reward_clip": 1.0,
            "previous_action_and_reward": True,
        },
        run={
            "envs_per_actor": 8,
            "max_env_steps": 10_000_000,
            "evaluate_period": 500_000,
            "num_evaluation_episodes": 8,
            "publish_period": 1,
            "learner_log_period": 50,
        },
    ),
}
