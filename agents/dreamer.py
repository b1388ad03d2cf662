"""DreamerV3: a world model from replayed sequences, and a policy that learns in its imagination.

Hafner et al. (2025), "Mastering diverse control tasks through world models"; the defaults are the `size1m`
of the authors' code. One learner step improves the model on real sequences, imagines from each of their
states, and improves policy and value on that. The three losses share one batch, one optimizer and one
encoding, and the loss of the value also shapes the model; so they are one learner.

An item of replay is a sequence of rows of one env, with the state that the actor had *after* the first row.
This row is context. It has the action, reward and discount that led to the next row:

```text
row           0       | 1 ... b | b+1 ... b+U        b = burn_in, U = unroll_length
state        stored ^ | burn-in | learned
sees          o_0, a_0, r_1     | o_t with a_{t-1}; predicts o_t, r_t (in row t-1), and if the episode ends
next item               period ...
```

Sequences continue across the ends of episodes, where the state restarts. Each env step is learned from
`samples_per_insert * unroll_length / period` times: the authors' *train ratio*.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import tree
from torch import nn

from agents.r2d2 import sequence_adder
from framework import adders, learners, losses, networks, replay
from framework import config_checks as check
from framework.adders import PriorityFn
from framework.learners import LossContext, LossOutput
from framework.replay.contracts import ReplayClient
from framework.runs.presets import Preset
from framework.specs import EnvironmentSpec
from framework.torch_agents import OffPolicyAgent, OffPolicyConfig, TorchPolicy
from framework.types import Nest, Step


@dataclass(frozen=True)
class DreamerConfig(OffPolicyConfig):
    """Settings of DreamerV3, in addition to `OffPolicyConfig`'s. An *item* is one sequence."""

    discount: float = 1.0 - 1.0 / 333.0  # Per env step. Higher values look further ahead.
    unroll_length: int = 64  # Rows of a sequence that are learned from.
    burn_in: int = 0  # Rows before them, which only bring the stored state up to date.
    period: int = 16  # Env steps from the start of one sequence to the start of the next.
    max_replay_size: int = 60_000  # Maximum number of sequences; the oldest are removed first.
    min_replay_size: int = 64  # Sequences in replay before learning begins.
    batch_size: int = 16  # Sequences per learner step.
    samples_per_insert: float = 8.0  # Times a sequence is drawn on average.
    insert_burst: int = 16  # Items by which inserts may lead or trail the ratio; also the limit in flight.

    # Learning.
    learning_rate: float = 4e-5  # Initial learning rate of LaProp.
    learning_rate_warmup: int = 1000  # Learner steps over which the learning rate rises from 0.
    adam_epsilon: float = 1e-20  # Epsilon of LaProp.
    gradient_clip_ratio: float | None = 0.3  # Largest norm of a tensor's gradient, in norms of the tensor.
    dynamics_coefficient: float = 1.0  # Weight of the divergence that moves predictions to the states.
    representation_coefficient: float = 0.1  # Weight of the divergence that moves states to predictions.
    free_nats: float = 1.0  # Divergences below this are not reduced any more.

    # Policy and value.
    imagination_length: int = 15  # Steps that are imagined from each state.
    # Rows at the end of each sequence from which to imagine; None: all. Fewer make a step cheaper.
    imagination_rows: int | None = None
    trace_lambda: float = 0.95  # 0 trusts the values, 1 the imagined rewards: less bias, more variance.
    entropy_coefficient: float = 3e-4  # Weight of the policy's entropy in nats, beside returns of range 1.
    return_range_rate: float = 0.01  # Weight of a batch in the running range of returns, which scales them.
    slow_value_coefficient: float = 1.0  # Weight of the distance to the slow value in the value's loss.
    replay_value_coefficient: float = 0.3  # Weight of the value's loss on the real rows.

    # Networks.
    deter_size: int = 512  # Width of the recurrent state; a multiple of `blocks`.
    blocks: int = 8  # Blocks of the recurrent layer, each connected to itself only.
    stoch_size: int = 32  # Samples in a state.
    classes: int = 4  # Classes of each sample.
    uniform_mix: float = 0.01  # Weight of the uniform distribution in the distribution of each sample.
    hidden_size: int = 64  # Width of the layers within the recurrent model.
    units: int = 64  # Width of all other layers.
    num_layers: int = 3  # Layers of encoder, decoder, policy and value; reward and continuation have one.
    depth: int = 4  # The convolutions for pictures have 2, 3, 4 and 4 times as many filters.
    num_bins: int = 255  # Bins of the distributions of reward and value.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 2, "num_bins")
        check.at_least(self, 1, "unroll_length", "period", "imagination_length", "imagination_rows", "blocks")
        check.at_least(self, 1, "num_layers", "stoch_size", "classes", "hidden_size", "units", "depth")
        check.at_least(self, 0, "burn_in", "learning_rate_warmup", "free_nats", "entropy_coefficient")
        check.at_least(self, 0, "dynamics_coefficient", "representation_coefficient")
        check.at_least(self, 0, "slow_value_coefficient", "replay_value_coefficient")
        check.fraction(self, "trace_lambda", "return_range_rate", "uniform_mix")
        check.above(self, 0, "gradient_clip_ratio")
        check.ordered(self, "period", "unroll_length")
        check.ordered(self, "imagination_rows", "unroll_length")
        check.one_of(self, (1,), "n_step")
        check.one_of(self, (0,), "hindsight_goals")  # Goals are replaced in transitions only.
        size, blocks = self.deter_size, self.blocks
        if size < 1 or size % blocks:
            raise ValueError(f"deter_size: got {size}, expected a multiple of blocks, {blocks}. Change one.")


class DreamerNetworks(nn.Module):
    """The variables of DreamerV3; policies use `encoder`, `dynamics` and `policy`."""

    def __init__(self, config: DreamerConfig, spec: EnvironmentSpec):
        super().__init__()
        self.actions = actions = networks.Actions(spec.actions)
        self.targets = targets = networks.Targets(spec.observations)
        sizes = [config.units] * config.num_layers
        self.encoder = networks.Encoder(targets, sizes, config.depth)
        self.dynamics = networks.RSSM(
            self.encoder.output_size, actions.vector_size, config.deter_size, config.hidden_size,
            config.stoch_size, config.classes, config.blocks, config.uniform_mix,
        )  # fmt: skip
        width = self.dynamics.output_size
        self.decoder = networks.Decoder(width, targets, sizes, config.depth)
        self.reward = networks.TwoHotHead(width, [config.units], config.num_bins)
        self.continuation = networks.Dense(width, [config.units], 1)
        make_head = functools.partial(networks.BoundedGaussianHead, size=actions.vector_size)
        head = make_head(config.units) if actions.continuous else actions.make_head(config.units)
        self.policy = nn.Sequential(networks.Dense(width, sizes), head)
        self.value = networks.TwoHotHead(width, sizes, config.num_bins)
        self.return_range = networks.ReturnRange()


class DreamerPolicy(TorchPolicy):
    """Acts on sampled posterior states; in evaluations, on the most likely ones.

    The state is the last posterior state and action. The extras have the posterior state after the step, as
    `state`, and for continuous actions the `action` as sampled.
    """

    actions: networks.Actions

    def __init__(self, networks: DreamerNetworks, evaluation: bool = False):
        super().__init__(networks, networks.actions, ("encoder", "dynamics", "policy"))
        self._networks, self._evaluation = networks, evaluation

    def initial_state(self, batch_size: int) -> Nest:
        deter, stoch = self._networks.dynamics.initial_state(batch_size)
        return deter, stoch, deter.new_zeros(batch_size, self.actions.vector_size)

    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        nets, (deter, stoch, action) = self._networks, state
        dynamics = nets.dynamics
        deter = dynamics.advance(deter, stoch, dynamics.action_vectors(action))
        embedded = dynamics.posterior_embedding(nets.encoder(*nets.targets(observation)))
        seen = dynamics.posterior(deter, embedded)
        noise = torch.ones_like(seen)
        if not self._evaluation:
            noise = networks.draw("gumbel", seen.shape, self.device, self.random).exp()
        stoch = dynamics.sample(seen, noise)
        policy = nets.policy(torch.cat([deter, stoch], -1))
        drawn = policy.mode() if self._evaluation else policy.sample(self.random)
        extras: dict[str, Nest] = {"state": (deter, stoch)}
        if self.actions.continuous:
            extras["action"] = drawn
        return drawn, extras, (deter, stoch, self.actions.vectors(drawn))


class Dreamer(OffPolicyAgent):
    """A world model, and a policy that learns from what the model imagines.

    ```python
    agent = Dreamer(DreamerConfig(samples_per_insert=32.0))
    config = programs.RunConfig(max_env_steps=100_000)
    program = programs.make_program(agent, "gymnasium:CartPole-v1", config)
    ```
    """

    config: DreamerConfig = DreamerConfig()
    target_names = ("value",)

    @property
    def extras_of_first_row(self) -> tuple[str, ...]:
        return ("state",)

    def env_steps_per_item(self) -> int:
        return self.config.period

    def make_networks(self, spec: EnvironmentSpec) -> DreamerNetworks:
        members = ("actions", "targets", "encoder", "dynamics", "decoder", "reward", "continuation", "policy")
        return self.custom_networks(spec, DreamerNetworks, (*members, "value", "return_range"))

    def make_policy(self, networks: DreamerNetworks, evaluation: bool = False) -> DreamerPolicy:
        return DreamerPolicy(networks, evaluation)

    def make_adder(
        self, client: ReplayClient, spec: EnvironmentSpec, priority_fn: PriorityFn | None = None
    ) -> adders.Adder:
        return sequence_adder(self, client, spec, priority_fn)

    def make_optimizer(self, networks: Any) -> torch.optim.Optimizer:
        config = self.config
        rates = learners.with_rates({networks: config.learning_rate})
        clip, warmup = config.gradient_clip_ratio, config.learning_rate_warmup
        return learners.LaProp(rates, eps=config.adam_epsilon, clip=clip, warmup=warmup)

    def loss(self, networks: Any, batch: replay.ReplaySample, context: LossContext) -> LossOutput:
        """The sum of all losses on a batch of `Step`s `[N, 1 + burn_in + unroll_length, ...]`."""
        config = self.config
        data = batch.data._replace(reward=batch.data.reward.float())
        if config.reward_clip is not None:
            data = data._replace(reward=data.reward.clamp(-config.reward_clip, config.reward_clip))
        features, world, metrics = self.world_model_loss(networks, data, context)
        features = features[:, -(config.imagination_rows or config.unroll_length) :]
        returns, behavior, more = self.behavior_losses(networks, features.detach().flatten(0, 1), context)
        first = returns[:, 0].view(len(features), -1)
        values = self.replay_value_loss(networks, data, features, first, context)
        metrics |= {**more, "replay_value_loss": values}
        return LossOutput(world + behavior + config.replay_value_coefficient * values, metrics)

    def world_model_loss(
        self, networks: Any, data: Step, context: LossContext
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Features `[N, U, F]` of the learned rows, the model's loss, and metrics."""
        config, dynamics, burn_in = self.config, networks.dynamics, self.config.burn_in
        actions = networks.actions.vectors(networks.actions.drawn(data))[:, :-1]
        observation = adders.restacked(data.observation, data.mask.shape[1])
        targets = networks.targets(tree.map_structure(lambda leaf: leaf[:, 1:], observation))
        starts, state = data.start_of_episode[:, 1:].bool(), data.extras["state"]
        noise = losses.race_noise(context.uniform_like(dynamics.samples_like(actions)))
        rows = networks.encoder(*targets), actions, starts
        deter, stoch, posterior = dynamics.observe(*rows, state, noise, burn_in)
        features = torch.cat([deter, stoch], -1)
        learned = [None if each is None else each[:, burn_in:] for each in targets]
        reconstruction = networks.decoder.loss(features, *learned).mean()
        # What led to a row is in the row before it; nothing led to the first row of an episode.
        starts, before = starts[:, burn_in:], slice(burn_in, -1)
        rewards = data.reward[:, before].masked_fill(starts, 0.0)
        going_on = config.discount * data.discount[:, before].float().masked_fill(starts, 1.0)
        reward = networks.reward.loss(networks.reward(features), rewards).mean()
        logits = networks.continuation(features).squeeze(-1)
        continuation = nn.functional.binary_cross_entropy_with_logits(logits, going_on)
        prior = dynamics.prior(deter)
        kl, representation = losses.balanced_kl(posterior, prior, config.free_nats)
        loss = reconstruction + reward + continuation + config.dynamics_coefficient * kl.mean()
        loss = loss + config.representation_coefficient * representation.mean()
        metrics = {"reconstruction_loss": reconstruction, "reward_loss": reward, "kl": kl.mean()}
        return features, loss, {**metrics, "continuation_loss": continuation}

    def behavior_losses(
        self, networks: Any, features: torch.Tensor, context: LossContext
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Returns `[M, H]` imagined from `features [M, F]`, the losses of policy and value, metrics."""
        config, length = self.config, self.config.imagination_length
        of_actions = features.new_empty(len(features), length, networks.actions.vector_size)
        noise = losses.race_noise(context.uniform_like(networks.dynamics.samples_like(of_actions)))
        if networks.actions.continuous:
            of_actions = context.normal_like(of_actions)
        else:
            of_actions = losses.race_noise(context.uniform_like(of_actions)).log()
        models = networks.policy, networks.actions
        features, actions = networks.dynamics.imagine(features, *models, noise, of_actions)
        logits = networks.value(features)
        values = networks.value.mean_of(logits.detach())
        with torch.no_grad():
            rewards = networks.reward.mean(features)
            going_on = networks.continuation(features).squeeze(-1).sigmoid()
            # The model predicts with a state what led to it; `losses.returns` has it in the row before.
            following, discounts = (nn.functional.pad(each[:, 1:], (0, 1)) for each in (rewards, going_on))
            mask, lambda_ = torch.ones_like(values), config.trace_lambda
            returns = losses.lambda_returns(following, discounts, values, mask, lambda_)[:, :length]
            weights = going_on.cumprod(1)[:, :length]
            scale = networks.return_range.scale(context.gathered(returns), config.return_range_rate)
            advantages = (returns - values[:, :length]) / scale
        policy = networks.policy(features[:, :length])
        entropy = policy.entropy()
        gains = policy.log_prob(actions) * advantages + config.entropy_coefficient * entropy
        actor = -(weights * gains).mean()
        slow, weight = context.targets["value"], config.slow_value_coefficient
        given = features[:, :length], logits[:, :length], returns, slow, weight
        value = (weights * networks.value.regularized_loss(*given)).mean()
        metrics = {"actor_loss": actor, "value_loss": value, "return_scale": scale, "entropy": entropy.mean()}
        metrics |= {"imagined_reward": rewards.mean(), "value_mean": values.mean()}
        return returns, actor + value, metrics

    def replay_value_loss(
        self, networks: Any, data: Step, features: torch.Tensor, imagined: torch.Tensor, context: LossContext
    ) -> torch.Tensor:
        """The value's loss on the last K real rows: lambda-returns that bootstrap from the `imagined [N, K]`.

        It also moves the `features [N, K, F]`, and so the world model.
        """
        count = features.shape[1]
        rewards, discounts, mask = (each[:, -count:] for each in (data.reward, data.discount, data.mask))
        discounts = self.config.discount * discounts.float()
        returns = losses.lambda_returns(rewards, discounts, imagined, mask, self.config.trace_lambda)[:, :-1]
        features, slow = features[:, :-1], (context.targets["value"], self.config.slow_value_coefficient)
        each = networks.value.regularized_loss(features, networks.value(features), returns, *slow)
        return (mask[:, :-1] * each).sum() / max(1, each.numel())


PRESETS: Mapping[str, Preset] = {
    # Smaller networks and shorter sequences than published, and 32 times fewer learner steps. Seed 1 had 480
    # after 20,176 env steps. Without statistics of observations, which are small, it had 163 after 15,095.
    "gymnasium:CartPole-v1": Preset(
        agent={
            "normalize_observations": True,
            "unroll_length": 16,
            "period": 8,
            "imagination_rows": 4,
            "samples_per_insert": 16.0,
            "deter_size": 128,
            "hidden_size": 32,
            "stoch_size": 16,
            "num_layers": 2,
            "learning_rate": 6e-4,
            "learning_rate_warmup": 100,
        },
        run={
            "num_actors": 1,
            "envs_per_actor": 4,
            "max_env_steps": 60_000,
            "target_return": 475.0,
            "evaluate_period": 5_000,
        },
    ),
}
_SMALL = {**PRESETS["gymnasium:CartPole-v1"].agent, "unroll_length": 32, "period": 16, "imagination_rows": 8}
_SMALL |= {"samples_per_insert": 32.0, "deter_size": 256, "learning_rate": 3e-4}
PRESETS = {
    **PRESETS,
    # These have not been run to their ends: a learner step of 512 rows for every 8 env steps.
    **dict.fromkeys(
        ("dm_control:cartpole/swingup", "dm_control:finger/spin"),
        Preset(
            agent=_SMALL,
            run={"num_actors": 1, "envs_per_actor": 4, "max_env_steps": 100_000, "evaluate_period": 10_000},
        ),
    ),
    "minatar:*": Preset(
        agent={**_SMALL, "normalize_observations": False, "samples_per_insert": 8.0, "depth": 8},
        run={"num_actors": 1, "envs_per_actor": 8, "max_env_steps": 1_000_000, "evaluate_period": 100_000},
    ),
}
