"""IMPALA: an actor-critic that corrects for the age of its data by V-trace (Espeholt et al., 2018).

Actors write unrolls of T steps into a queue, with parameters that may be a few learner steps old. The learner
takes batches from the queue and uses each unroll once. V-trace weights the actions of the actors' policy mu
by their probability under the learner's policy pi. The logs show the difference between the two policies:
`staleness` in learner steps, and `rho_clipped` and `c_clipped`, the shares of clipped importance weights.

Replay holds all inputs of the actors' policy. The last action and reward are part of the observation (a
wrapper of the environment adds them). The log-probability of the action, and the state of the LSTM at the
start of each unroll, are extras.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from framework import config_checks as check
from framework import losses, networks
from framework.learners import LossContext, LossOutput, rmsprop
from framework.replay import ReplaySample
from framework.runs.presets import ATARI_2015_RUN, Preset
from framework.specs import EnvironmentSpec
from framework.torch_agents import OnPolicyAgent, OnPolicyConfig, TorchPolicy, previous_action_and_reward
from framework.types import Nest, Step


@dataclass(frozen=True)
class IMPALAConfig(OnPolicyConfig):
    """Settings of IMPALA, in addition to `OnPolicyConfig`'s."""

    may_be_infinite: ClassVar[tuple[str, ...]] = ("max_gradient_norm", "clip_rho", "clip_c")

    # What is learned from.
    unroll_length: int = 20  # T, steps of an env in an unroll. More bootstraps later, from older data.
    previous_action_and_reward: bool = False  # The policy also sees the last action and (clipped) reward.
    previous_reward: bool = False  # The policy also sees the last (clipped) reward, without the action.

    # The queue between actors and learner.
    batch_size: int = 16  # N, unrolls in a learner step: N * T env steps.
    queue_batches: int = 2  # Batches before actors wait. On serial, (this - 1) * N must hold an actor's envs.
    unrolls_in_flight: int = 1  # Unrolls of an env in transit to the queue. More: for far hosts; older data.
    prefetch_batches: int = 1  # Batches that the learner fetches ahead, besides those in the queue.

    # V-trace. The loss is the mean over the steps of a batch; the paper's is the sum, N * T times as large.
    vtrace_lambda: float = 1.0  # 1 is the paper's; less cuts the variance of long unrolls, and adds bias.
    clip_rho: float = 1.0  # Largest importance weight of an error: higher follows pi further from mu.
    clip_c: float = 1.0  # Largest importance weight in a trace: higher passes rewards back faster, noisily.

    # Learning.
    optimizer: str = "rmsprop"  # "rmsprop" or "adam".
    learning_rate: float = 5e-4  # Initial learning rate of the optimizer.
    rmsprop_decay: float = 0.99  # Decay of RMSprop's mean of squared gradients. Higher remembers longer.
    rmsprop_momentum: float = 0.0  # Share of the last update that is added to the next.
    adam_epsilon: float = 1e-5  # Epsilon of Adam or RMSprop. Larger values damp steps at small gradients.
    max_gradient_norm: float | None = 0.5  # Larger gradients are scaled down to this.

    # Networks.
    torso: str = "shallow"  # Image layers: shallow, deep (the paper's), nature (DQN's), data_efficient.
    hidden_sizes: tuple[int, ...] = (64, 64)  # Hidden layers for observations without images.
    activation: str = "tanh"  # Activation of the hidden layers: relu, tanh, elu or silu.
    lstm_size: int | None = None  # Width of an LSTM after the torso. None: a feed-forward network.
    lstm_layers: int = 1  # Layers of that LSTM.
    actor_autocast: bool = False  # bfloat16 mixed precision in the actors: faster for batches of images.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "batch_size", "queue_batches", "unrolls_in_flight")
        check.at_least(self, 1, "hidden_sizes", "lstm_size", "lstm_layers")
        check.at_least(self, 0, "prefetch_batches", "clip_rho", "clip_c", "rmsprop_momentum")
        check.fraction(self, "vtrace_lambda", "rmsprop_decay")
        check.one_of(self, ("rmsprop", "adam"), "optimizer")
        check.one_of(self, networks.CONVOLUTIONS, "torso")
        check.one_of(self, networks.ACTIVATIONS, "activation")


class ActorCritic(networks.RecurrentEncoder):
    """Torso, optional LSTM, and the heads of policy and value."""

    def __init__(self, config: IMPALAConfig, spec: EnvironmentSpec):
        sizes, torso = (config.hidden_sizes, config.lstm_size), networks.CONVOLUTIONS[config.torso]
        super().__init__(spec.observations, *sizes, config.activation, torso, config.lstm_layers)
        self.policy = networks.make_actions(spec.actions).make_head(self.output_size)
        self.value = nn.Linear(self.output_size, 1)

    def step(self, observation: Nest, state: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
        """One step of acting: `[B, ...]` to the distribution over actions and the next state."""
        features, state = super().step(observation, state)
        return networks.masked_policy(self.policy, features, observation), state

    def unroll(  # type: ignore[override]
        self, observation: Nest, state: tuple[torch.Tensor, ...], start_of_episode: torch.Tensor
    ) -> tuple[Any, torch.Tensor]:
        """Sequences `[N, T + 1, ...]` to distributions over actions and values, `[N, T + 1]`.

        The first row continues from `state`, which is the initial state where an episode begins there.
        """
        inside = start_of_episode.clone()
        inside[:, 0] = False  # The first row's state is stored, whether an episode begins there or not.
        features = super().unroll(observation, state, inside)
        policy = networks.masked_policy(self.policy, features, observation)
        return policy, networks.in_float32(self.value, features).squeeze(-1)


class IMPALANetworks(nn.Module):
    """The only variable of IMPALA: `actor_critic`."""

    def __init__(self, config: IMPALAConfig, spec: EnvironmentSpec):
        super().__init__()
        self.actions = networks.make_actions(spec.actions)
        self.actor_critic = ActorCritic(config, spec)


class IMPALAPolicy(TorchPolicy):
    """Samples actions from the policy, or takes the most likely one.

    Extras of each step: `log_prob` of the action, the `version` of the parameters, the unclipped `action` if
    some of it is continuous, and with an LSTM its `state` before the step.

    Args:
      networks: the networks, which the policy reads at each step.
      autocast: whether to use bfloat16 mixed precision.
      evaluation: whether to take the most likely action.
    """

    def __init__(self, networks: IMPALANetworks, autocast: bool = False, evaluation: bool = False):
        super().__init__(networks, networks.actions, variables=("actor_critic",))
        self._actor_critic = networks.actor_critic
        self._greedy = evaluation
        self._precision: Any = contextlib.nullcontext()
        if autocast:
            self._precision = torch.autocast(self.device.type, torch.bfloat16)

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        return self._actor_critic.initial_state(batch_size)

    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        with self._precision:
            policy, next_state = self._actor_critic.step(observation, state)
        drawn = policy.mode() if self._greedy else policy.sample(self.random)
        log_prob = policy.log_prob(drawn).float()
        extras = {"log_prob": log_prob, "version": self.versions(log_prob)}
        if self.actions.continuous:
            extras["action"] = drawn  # The environment gets it clipped.
        return drawn, {**extras, "state": state} if state else extras, next_state


class IMPALA(OnPolicyAgent):
    """V-trace actor-critic for discrete and continuous actions, and nests of them.

    ```python
    agent = IMPALA(IMPALAConfig(lstm_size=256, previous_action_and_reward=True))
    config = programs.RunConfig(num_actors=2, envs_per_actor=8)
    program = programs.make_program(agent, environment_factory, config)
    ```
    """

    config: IMPALAConfig = IMPALAConfig()
    memory_field = "lstm_size"
    takes_action_masks = True

    @property
    def max_policy_lag(self) -> None:
        """None: actors run ahead until the queue is full."""
        return None

    @property
    def items_per_step(self) -> int:
        return self.config.batch_size

    @property
    def queue_batches(self) -> int:
        return self.config.queue_batches

    @property
    def unrolls_in_flight(self) -> int:
        return self.config.unrolls_in_flight

    @property
    def prefetch_batches(self) -> int:
        # Batches that one of several learners fetches ahead are missing for the others: the queue needs more.
        batches = self.config.prefetch_batches
        return batches if self.num_learners == 1 else min(batches, self.config.queue_batches)

    def environment_wrappers(self) -> Sequence[Any]:
        """Adds the last action and reward to the observation with `previous_action_and_reward`."""
        return previous_action_and_reward(self.config, self.config.previous_reward)

    def make_optimizer(self, networks: Any) -> torch.optim.Optimizer:
        is_adam = self.config.optimizer == "adam"
        return super().make_optimizer(networks) if is_adam else rmsprop(networks, self.config)

    def make_networks(self, spec: EnvironmentSpec) -> IMPALANetworks:
        members = ("actions", "actor_critic.initial_state", "actor_critic.step", "actor_critic.unroll")
        return self.custom_networks(spec, IMPALANetworks, members)

    def make_policy(self, networks: IMPALANetworks, evaluation: bool = False) -> IMPALAPolicy:
        return IMPALAPolicy(networks, self.config.actor_autocast, evaluation)

    def loss(self, networks: IMPALANetworks, batch: ReplaySample, context: LossContext) -> LossOutput:
        """The loss of a batch of `Step`s `[N, T + 1, ...]`."""
        data = batch.data
        # The actor's state before the first row, because the learner's state would need the whole episode.
        state = data.extras.get("state", ())
        policy, values = networks.actor_critic.unroll(data.observation, state, data.start_of_episode)
        log_probs, values = policy.log_prob(networks.actions.drawn(data)).float(), values.float()
        log_rhos = log_probs - data.extras["log_prob"]
        vtrace = self.vtrace(data, log_rhos, values)
        counted = losses.transition_mask(data.mask)
        policy_loss = losses.policy_gradient_loss(log_probs, vtrace.advantages, counted)
        return self.whole_loss(policy_loss, policy, values, vtrace, log_rhos, data, context)

    def vtrace(self, data: Step, log_rhos: torch.Tensor, values: torch.Tensor) -> losses.VTrace:
        """V-trace of rows `[N, T + 1]`; `log_rhos` compare the rated policy with the one that acted."""
        config, rewards = self.config, self.rewards(data)
        discounts = config.discount * data.discount.float()
        settings = config.vtrace_lambda, config.clip_rho, config.clip_c
        return losses.vtrace(log_rhos, rewards, discounts, values, data.mask, *settings)

    def whole_loss(
        self,
        policy_loss: torch.Tensor,
        policy: Any,
        values: torch.Tensor,
        vtrace: losses.VTrace,
        log_rhos: torch.Tensor,
        data: Step,
        context: LossContext,
    ) -> LossOutput:
        """Adds the losses of values and entropy, and the metrics."""
        config, counted = self.config, losses.transition_mask(data.mask)
        value_loss = losses.value_loss(values, vtrace.targets, counted)
        entropy = losses.masked_mean(policy.entropy().float(), counted)
        loss = policy_loss + config.value_coefficient * value_loss - config.entropy_coefficient * entropy
        with torch.no_grad():
            age = (context.learner_steps - data.extras["version"]).float()
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


RUN = {"envs_per_actor": 8, "publish_period": 1, "learner_log_period": 50}

PRESETS: Mapping[str, Preset] = {
    # 500 of 500, greedy over 100 episodes, at 150,000 steps on each of seeds 1 to 5.
    "gymnasium:CartPole-v1": Preset(
        agent={
            "optimizer": "adam",
            "learning_rate": 4e-3,
            "learning_rate_decay": 150_000,
            "unroll_length": 16,
            "batch_size": 8,
            "vtrace_lambda": 0.95,
            "value_coefficient": 0.1,  # Returns go up to 100: their gradient would drown the policy's.
        },
        run={**RUN, "max_env_steps": 150_000, "evaluate_period": 25_000},
    ),
    # Chosen on seed 101; 500 at the end on seeds 102 to 104, too, with a fall to 148 to 242 on the way.
    "testing:CartPoleWithoutVelocities": Preset(
        agent={
            "optimizer": "adam",
            "learning_rate": 1e-3,
            "learning_rate_decay": 300_000,
            "unroll_length": 32,
            "batch_size": 8,
            "reward_clip": 0.05,  # Each reward is 1: errors of large values would drown the policy.
            "vtrace_lambda": 0.95,
            "value_coefficient": 0.5,
            "entropy_coefficient": 1e-3,
            "lstm_size": 64,
        },
        run={
            **RUN,
            "max_env_steps": 300_000,
            "target_return": 475.0,
            "wrappers": ("ScaleObservation(scale=10)",),  # Unscaled, it is at chance after 120,000 steps.
            "evaluate_period": 25_000,
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
            **RUN,
            "max_env_steps": 200_000,
            "target_return": 0.99,
            "evaluate_period": 25_000,
            "num_evaluation_episodes": 100,
        },
    ),
    # 11.8 to 21.0, greedy over 100 episodes, at 2,000,000 steps on seeds 1 to 5. Many small batches: with
    # episodes of 320 steps, at a rate of 2e-3, some seeds stay at 6 for a million steps and more.
    "minatar:Breakout": Preset(
        agent={
            "optimizer": "adam",
            "learning_rate": 7e-4,
            "learning_rate_decay": 2_000_000,
            "learning_rate_end": 0.05,
            "discount": 0.97,
            "unroll_length": 10,
            "batch_size": 8,
            "vtrace_lambda": 0.95,
            "value_coefficient": 0.25,
            "entropy_coefficient": 0.02,
        },
        run={**RUN, "max_env_steps": 2_000_000, "evaluate_period": 100_000},
    ),
    # Chosen on seed 101. Twice as many steps in an update (T = 20) took off almost twice as late.
    "atari:Pong": Preset(
        agent={
            "optimizer": "adam",
            "learning_rate": 6e-4,
            "learning_rate_decay": 10_000_000,
            "autocast": True,
            "actor_autocast": True,
            "unroll_length": 10,
            "batch_size": 8,
            "reward_clip": 1.0,
            "vtrace_lambda": 0.95,
            "value_coefficient": 1.0,
            "entropy_coefficient": 0.005,
        },
        run={
            **RUN,
            "environment_options": {"sticky_actions": 0.0},
            "max_env_steps": 10_000_000,
            "max_evaluation_steps": 27_000,  # Whole games.
            "evaluate_period": 500_000,
            "num_evaluation_episodes": 8,
        },
    ),
    # PolyBeast's network without its LSTM, `lstm_size=256`. The paper's other one is `torso="shallow"`.
    # Epsilon and the gradient norm are the paper's 0.01 and 40 by 32 x 20 steps, since our loss is a mean and
    # the paper's a sum.
    "atari:*": Preset(
        agent={
            "reward_clip": 1.0,
            "previous_reward": True,
            "batch_size": 32,
            "learning_rate": 6e-4,
            "learning_rate_decay": 50_000_000,
            "adam_epsilon": 0.01 / 640,
            "max_gradient_norm": 40.0 / 640,
            "torso": "deep",
        },
        run={**ATARI_2015_RUN, **RUN, "num_actors": 2},
        source="Espeholt et al. (2018), table G.1",
        sources={"Küttler et al. (2019), PolyBeast": "previous_reward adam_epsilon"},
    ),
}
