"""Base classes of agents in PyTorch. A new agent is a config, networks, a policy and a loss:

```python
class MyConfig(OffPolicyConfig): ...                # settings in addition to the common ones

class MyPolicy(TorchPolicy):
    def act(self, observation, state): ...          # tensors to sampled actions, extras, next state

class MyAgent(OffPolicyAgent):
    def make_networks(self, spec): ...
    def make_policy(self, networks, evaluation=False): ...
    def loss(self, networks, batch, context): ...   # a batch to a LossOutput
```

`OffPolicyAgent` learns from a replay of n-step transitions, `OnPolicyAgent` from fresh unrolls.
Both make the tables, adder, dataset and learner from the fields of the config. An agent overrides a method
only to change a part.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import tree
from torch import nn
from typing_extensions import Self

from framework import adders, config_checks, core, environments, learners, losses, replay, specs
from framework.adders import PriorityFn
from framework.agent_configs import ActorCriticConfig as ActorCriticConfig
from framework.agent_configs import AgentConfig as AgentConfig
from framework.agent_configs import ControlConfig as ControlConfig
from framework.agent_configs import OffPolicyConfig as OffPolicyConfig
from framework.agent_configs import OnPolicyConfig as OnPolicyConfig
from framework.agent_configs import UnrollConfig as UnrollConfig
from framework.datasets import DEMONSTRATIONS_TABLE, Dataset
from framework.datasets.demonstrations import fill, table_of_episodes
from framework.devices import check_visible, device_of_learner
from framework.learners import LossContext, LossOutput, schedules
from framework.learners.gradient import PAYS_FROM_STEPS, why_not
from framework.networks import ObservationNormalizer, check_action_mask, inputs
from framework.own_settings import OwnSettings
from framework.replay.contracts import ReplayClient
from framework.session import Session
from framework.torch_policy import TorchPolicy as TorchPolicy
from framework.types import Nest, Step, Transition


class TorchAgent(core.Agent):
    """Common base of `OffPolicyAgent` and `OnPolicyAgent`.

    Args:
      config: the settings; None for the defaults, which are an attribute of the class.
      networks_fn: makes the networks in place of the agent's own; None for those.

    Attributes:
      takes_action_masks: whether observations may have an `action_mask`.
      learning_rates: for children of the networks with a learning rate of their own, the field that has it.
        Empty: all parameters have `learning_rate`.
      memory_field: the field of the config that is None for networks without a memory; empty for an agent
        whose networks never have one. With a memory, the extras of the policy have its `state`.
    """

    config: AgentConfig
    takes_action_masks: ClassVar[bool] = False
    learning_rates: ClassVar[Mapping[str, str]] = {}
    memory_field: ClassVar[str] = ""

    def __init__(self, config: Any = None, networks_fn: core.NetworksFn | None = None):
        if config is not None:
            if isinstance(config, type) or not dataclasses.is_dataclass(config):  # It need not inherit ours.
                example = f"such an object, as {type(self.config).__name__}() is"
                config_checks.instance("config", config, AgentConfig, example)
            self.config = config
        self.networks_fn = networks_fn

    @property
    def has_memory(self) -> bool:
        return bool(self.memory_field) and getattr(self.config, self.memory_field) is not None

    @property
    def extras_of_first_row(self) -> tuple[str, ...]:
        """Extras of the policy that are stored only with the first row of an unroll or a sequence."""
        return ("state",) if self.has_memory else ()

    @abc.abstractmethod
    def loss(self, networks: Any, batch: Any, context: LossContext) -> LossOutput:
        """The loss of `networks` on a `ReplaySample` of tensors (or a minibatch), a mean over its items."""

    def custom_networks(
        self, spec: specs.EnvironmentSpec, default: core.NetworksFn, members: Sequence[str]
    ) -> Any:
        """The networks that `networks_fn` makes, or `default` without one.

        Initial parameters come from torch's global generator, which the program seeds.

        Args:
          spec: the spec of one env.
          default: makes the agent's own networks.
          members: attributes that the agent needs; `part.name` for a part's. One of them is `initial_state`,
            if there is a `memory_field`.

        Raises:
          ValueError: The networks are not a torch module with these members, they have a memory and the
            config does not say so, or the observation has an `action_mask` that the agent cannot use.
        """
        check_action_mask(spec, type(self).__name__, self.takes_action_masks)
        if self.networks_fn is None:
            specs.check_sizes(spec)
        spec = spec._replace(observations=inputs.declared(spec.observations, self.config.inputs))
        with OwnSettings():
            networks = (self.networks_fn or default)(self.config, spec)
        missing = [member for member in members if not _has(networks, member)]
        if missing or not isinstance(networks, nn.Module):
            raise ValueError(
                f"networks_fn: got {type(networks).__name__} without {', '.join(missing) or 'parameters'}, "
                f"expected a torch module that has {', '.join(members)}. Make the agent's own networks, "
                "replace parts of them and return them, or see docs/agents.md."
            )
        if self.memory_field:
            (path,) = (member for member in members if member.endswith("initial_state"))
            self._check_memory(operator.attrgetter(path)(networks)(1))
        return networks

    def _check_memory(self, state: Nest) -> None:
        field, is_known = self.memory_field, self.has_memory
        if is_known != bool(tree.flatten(state)):
            raise ValueError(
                f"networks_fn: got networks {'without' if is_known else 'with'} a memory and {field} "
                f"{getattr(self.config, field)!r}, expected both or neither. {field} makes replay store the "
                "memory's state."
            )

    def session(self, spec: specs.EnvironmentSpec, num_envs: int = 1, seed: int = 0) -> Session:
        """This agent without a program, for an application that steps the environments itself.

        ```python
        session = agent.session(specs.from_spaces(env.observation_space, env.action_space))
        action = session.act(observation[None])[0]            # [1, ...] to [1, ...]: a row for each env
        session.observe(next_observation[None], [reward], terminated, truncated)
        metrics = session.learn()
        ```

        Args:
          spec: the spec of one env.
          num_envs: largest number of episodes that are open at the same time.
          seed: seed of the initial parameters and of all random choices. The global generators of torch and
            numpy are left as they are.
        """
        return Session(self, spec, num_envs, seed)

    def describe_inputs(self, spec: specs.EnvironmentSpec) -> list[str]:
        return inputs.describe(spec.observations, self.config.inputs)

    def make_optimizer(self, networks: Any) -> torch.optim.Optimizer:
        """Adam for all parameters that need a gradient, with the `learning_rates`."""
        config, rates = self.config, {networks: self.config.learning_rate}
        if self.learning_rates:
            rates = {getattr(networks, child): getattr(config, f) for child, f in self.learning_rates.items()}
        return learners.Adam(learners.with_rates(rates), eps=config.adam_epsilon)

    def learner_settings(self, networks: nn.Module) -> dict[str, Any]:
        """Keyword arguments of `SGDLearner` and `MinibatchLearner` that follow from the config."""
        config = self.config
        decay, end = config.learning_rate_decay, config.learning_rate_end
        return {
            "optimizer_fn": lambda parameters: self.make_optimizer(networks),
            "learning_rate_schedule": None if decay is None else schedules.linear(1.0, end, decay),
            "max_gradient_norm": config.max_gradient_norm,
            # The global generator draws it, as it draws the initial parameters.
            "seed": int(torch.randint(2**31, (), device="cpu")),
            "device": check_visible("device", self.device),
            "devices": {
                name: check_visible(f"devices.{name}", device)
                for name, device in config_checks.flat_names(config.devices).items()
            },
            "step_mode": "eager" if config.step_mode == "auto" else config.step_mode,
            "autocast_dtype": torch.bfloat16 if config.autocast else None,
        }

    def make_learner(self, networks: Any, spec: specs.EnvironmentSpec) -> core.Learner:
        return learners.SGDLearner(networks, self.loss, **self.learner_settings(networks))

    def decided(self, config: Any, recorded: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """See `Agent.decided`: chooses a `step_mode` in place of "auto"."""
        own: Any = self.config
        if not isinstance(own, AgentConfig):  # An agent of several parts has another config.
            return self, []
        mode, device, lines = own.step_mode, torch.device(own.device), []
        if mode == "auto":
            count = 0.0 if config.dataset is None else float(config.max_learner_steps or 0)
            if config.max_env_steps is not None:
                count = self.for_program(config.num_envs).optimizer_steps(config.max_env_steps)
            pays = count >= PAYS_FROM_STEPS and config.num_learners == 1 and not own.devices
            mode = recorded.get("step_mode") or ("compile" if pays else "eager")
            if why_not(mode, device, own.devices):  # The run may have begun on another machine or device.
                mode = "eager"
            lines.append(f"step_mode auto: {mode}, for about {count:,.0f} optimizer steps")
        elif reason := why_not(mode, device, own.devices):
            raise ValueError(f"step_mode: got {mode!r} {reason}")
        if mode != "eager" and config.num_learners > 1:
            lines.append(f"step_mode {mode}: several learners compute as in 'eager'")
        agent = copy.copy(self)
        agent.config = dataclasses.replace(own, step_mode=mode)
        return agent, lines

    def optimizer_steps(self, env_steps: int) -> float:
        """About how many steps of the optimizer `env_steps` env steps of the program make; 0: not known."""
        return 0.0

    def for_worker(self, num_envs: int) -> Self:
        """See `Agent.for_worker`: its batches are on the CPU."""
        agent = super().for_worker(num_envs)
        step_mode = "eager" if agent.config.step_mode == "cuda_graph" else agent.config.step_mode
        agent.config = dataclasses.replace(agent.config, device="cpu", devices={}, step_mode=step_mode)
        return agent

    @property
    def device(self) -> str:
        """Device of the learner in this node. With "cuda", each of several learners has its own GPU."""
        return device_of_learner(self.config.device, self.rank, self.num_learners)

    def check_shards(self) -> None:
        if self.config.devices:
            config_checks.refuse(self.config, "devices", " with several learners, expected none of either.")
        if self.items_per_step % self.num_learners:
            raise ValueError(
                f"num_learners: got {self.num_learners}, expected a divisor of {self.items_per_step}, the "
                "items of a learner step. Each learner gets an equal part of them."
            )

    @property
    @abc.abstractmethod
    def items_per_step(self) -> int:
        """Number of items in the batch of all learners together."""


def previous_action_and_reward(config: Any, reward: bool = False) -> Sequence[Any]:
    """The wrapper that adds the last action and reward to the observation, if the config asks for it.

    With `reward`, it adds the reward anyway.
    """
    action = config.previous_action_and_reward
    if not action and not reward:
        return ()
    settings = {"reward_clip": config.reward_clip, "action": action}
    return (functools.partial(environments.ObservationActionReward, **settings),)


def _has(module: Any, member: str) -> bool:
    try:
        operator.attrgetter(member)(module)
    except AttributeError:
        return False
    return True


class OffPolicyAgent(TorchAgent):
    """Learns from n-step transitions in replay, each `samples_per_insert` times on average.

    Attributes:
      target_names: children of the networks that have a target network.
      items_table: the table into which `make_adder` writes.
      needs_demonstrations: whether it learns nothing without `demonstrations`.
    """

    config: OffPolicyConfig = OffPolicyConfig()
    target_names: tuple[str, ...] = ()
    items_table: str = adders.REPLAY_TABLE
    needs_demonstrations: ClassVar[bool] = False

    @property
    def items_per_step(self) -> int:
        return self.config.batch_size

    def env_steps_per_item(self) -> int:
        """How many env steps of one env there are for each new item."""
        return 1

    def optimizer_steps(self, env_steps: int) -> float:
        items = env_steps / self.env_steps_per_item() * (1 + self.config.hindsight_goals)
        own = 1.0 if self.config.demonstrations is None else 1.0 - self.config.demonstration_fraction
        return items * self.config.samples_per_insert / (own * self.config.batch_size)

    def for_dataset(self, path: str) -> Self:
        if (shown := self.config.demonstrations) is not None or self.needs_demonstrations:
            raise ValueError(
                f"dataset: got {path!r} with demonstrations {shown!r}, expected one of them. Learn from the "
                "dataset first; then go on from that run with init, demonstrations, and actors."
            )
        agent = copy.copy(self)
        agent.dataset = path
        return agent

    def make_sampler(self) -> Any:
        """The selector that samples items; uniform by default."""
        return replay.selectors.Uniform()

    def make_tables(self, spec: specs.EnvironmentSpec) -> list[replay.Table]:
        config = self.config
        if self.dataset is not None:
            return [table_of_episodes(adders.REPLAY_TABLE, self.dataset, spec, self.make_sampler())]
        if config.demonstrations is None and self.needs_demonstrations:
            raise ValueError(
                "demonstrations: got None, expected a folder of episodes or module:function. Record episodes "
                "with repertory record, or framework.datasets.record."
            )
        limiter = replay.rate_limiters.SampleToInsertRatio(
            config.samples_per_insert,
            config.min_replay_size,
            # The buffer holds a burst of items on either side of the exact ratio, and one batch.
            config.insert_burst * config.samples_per_insert + config.batch_size,
        )
        sampler, remover = self.make_sampler(), replay.selectors.Fifo()
        tables = [replay.Table(adders.REPLAY_TABLE, sampler, remover, config.max_replay_size, limiter)]
        if (path := config.demonstrations) is not None:
            tables.append(table_of_episodes(DEMONSTRATIONS_TABLE, path, spec, self.make_sampler()))
        return tables

    def make_adder(
        self, client: ReplayClient, spec: specs.EnvironmentSpec, priority_fn: PriorityFn | None = None
    ) -> adders.Adder:
        """See `Agent.make_adder`. `priority_fn` gives the priorities of new items; None: the largest."""
        config = self.config
        options: dict[str, Any] = {
            "priority_fns": {self.items_table: priority_fn},
            "max_in_flight_items": config.insert_burst,  # Items in flight also count as being ahead.
            "reward_clip": config.reward_clip,
        }
        if config.hindsight_goals:
            options.update(num_goals=config.hindsight_goals, strategy=config.hindsight_strategy)
            outcome = specs.goal_outcome(spec)
            return adders.HindsightAdder(client, config.n_step, config.discount, outcome, **options)
        frames = specs.frame_stack(spec.observations)
        return adders.NStepTransitionAdder(
            client, config.n_step, config.discount, frame_stack=frames, **options
        )

    def make_dataset(self, client: ReplayClient, **options: Any) -> Dataset:
        """See `Agent.make_dataset`; `options` are `Dataset`'s."""
        config, table, path = self.config, adders.REPLAY_TABLE, self.dataset
        shares: Any = table
        if config.demonstrations is not None:
            table, path, share = DEMONSTRATIONS_TABLE, config.demonstrations, config.demonstration_fraction
            shares = {table: share, adders.REPLAY_TABLE: 1.0 - share}
        if path is not None and self.rank == 0:  # The others make no step before this one does.
            writer = copy.copy(self)
            writer.items_table = table
            options["while_waiting"] = fill(client, table, path, functools.partial(writer.make_adder, client))
        return Dataset(client, shares, config.batch_size // self.num_learners, device=self.device, **options)

    def rewards(self, data: Transition) -> tuple[torch.Tensor, torch.Tensor]:
        """The rewards of `Transition`s, and the discounts of the values that follow, both float32[N]."""
        # The adder omits one factor of the n-step discount; apply it here.
        return data.reward.float(), self.config.discount * data.discount.float()

    def custom_networks(
        self, spec: specs.EnvironmentSpec, default: core.NetworksFn, members: Sequence[str]
    ) -> Any:
        """See `TorchAgent.custom_networks`. With `normalize_observations`, adds the child `normalizer`."""
        made = super().custom_networks(spec, default, members)
        if self.config.normalize_observations:
            observations = inputs.declared(spec.observations, self.config.inputs)
            made.normalizer = ObservationNormalizer(observations, True)
        return made

    def make_learner(self, networks: Any, spec: specs.EnvironmentSpec) -> core.Learner:
        loss = self.normalized_loss if self.config.normalize_observations else self.loss
        return learners.SGDLearner(networks, loss, **self.learner_settings(networks))

    def normalized_loss(self, networks: Any, batch: replay.ReplaySample, context: LossContext) -> LossOutput:
        """Adds the observations of a batch to the statistics, and returns the `loss` of the scaled batch.

        The statistics cover the rows that were learned from, each as often as it was. The learner
        keeps them where batches are anyway, so several learners agree on them, and no count of what is
        inserted has to travel. Rows that stay in replay for long count more often. All networks, those that
        make the targets too, see current and next observations by the statistics of this step: a target
        network with older ones would change its values for reasons other than what it has learned. The
        normalizer is therefore a child of the networks without a target network. A learner that only applies
        the gradients of others sees no batches, and keeps no statistics.
        """
        data, rows = batch.data, None
        if hasattr(data, "mask"):  # Sequences.
            rows = data.mask > 0
            data = data._replace(observation=adders.restacked(data.observation, data.mask.shape[1]))
        networks.normalizer.update(data.observation, rows, context.total)
        return self.loss(networks, batch._replace(data=networks.normalizer.records(data)), context)

    def learner_settings(self, networks: nn.Module) -> dict[str, Any]:
        return super().learner_settings(networks) | {
            "target_names": self.target_names,
            "target_update_period": self.config.target_update_period,
            "target_update_rate": self.config.target_update_rate,
        }


class OnPolicyAgent(TorchAgent):
    """Learns from each unroll, or each episode, in one learner step, unless a subclass reuses data.

    A learner step uses one unroll of every env, or `episodes_per_batch` whole episodes.
    """

    config: UnrollConfig = UnrollConfig()

    @property
    def max_policy_lag(self) -> int | None:
        return 0

    @property
    def unroll_length(self) -> int:
        return self.config.unroll_length

    @property
    def items_per_step(self) -> int:
        return self.episodes_per_batch or self.num_envs

    def optimizer_steps(self, env_steps: int) -> float:
        return env_steps / (self.unroll_length * self.items_per_step)

    def rewards(self, data: Step) -> torch.Tensor:
        """The rewards float32[N, T] of rows to learn from, clipped as the config says."""
        return losses.clipped_rewards(data.reward, self.config.reward_clip)

    @property
    def queue_batches(self) -> int:
        """Number of batches in a full queue. Actors wait for versions, so the queue never fills up."""
        return 2 + (self.max_policy_lag or 0)

    @property
    def unrolls_in_flight(self) -> int:
        """Number of unrolls of an env that may be on their way to the queue while the next is made."""
        return 1

    @property
    def prefetch_batches(self) -> int:
        """Number of batches that a learner fetches ahead; 0 with several learners, which share one batch."""
        return 1 if self.num_learners == 1 else 0

    def make_tables(self, spec: specs.EnvironmentSpec) -> list[replay.Table]:
        # Each item is learned from once.
        return [replay.Table.queue(adders.QUEUE_TABLE, self.queue_batches * self.items_per_step)]

    def make_adder(self, client: ReplayClient, spec: specs.EnvironmentSpec) -> adders.Adder:
        if self.episodes_per_batch is not None:
            # The last observation has a row, too.
            return adders.EpisodeAdder(
                client,
                self.config.unroll_length + 1,
                priority_fns={adders.QUEUE_TABLE: None},
                max_in_flight_items=1,
                limit_name="unroll_length",
            )
        return adders.UnrollAdder(
            client,
            self.config.unroll_length,
            extras_of_first_row=self.extras_of_first_row,
            unrolls_in_flight=self.unrolls_in_flight,
        )

    def make_dataset(self, client: ReplayClient) -> Dataset:
        return Dataset(
            client,
            adders.QUEUE_TABLE,
            self.items_per_step // self.num_learners,
            device=self.device,
            prefetch=self.prefetch_batches,
            ragged="error" if self.episodes_per_batch is None else "pad",
        )


class MinibatchAgent(OnPolicyAgent):
    """Makes `config.epochs` passes over each batch, in minibatches of about `config.minibatch_size` steps.

    `prepare` gets the batch, `loss` each minibatch of what it returns, and `finish` the batch at the end; see
    `learners.MinibatchLearner`.
    """

    @abc.abstractmethod
    def prepare(self, networks: Any, batch: replay.ReplaySample, context: LossContext) -> learners.Prepared:
        """What minibatches are made of, without a gradient."""

    def finish(
        self, networks: Any, batch: replay.ReplaySample, prepared: learners.Prepared, context: LossContext
    ) -> dict[str, torch.Tensor]:
        """Metrics after the last pass. It may change statistics for the next batch."""
        return {}

    def optimizer_steps(self, env_steps: int) -> float:
        config: Any = self.config
        rows = config.minibatch_size or self.unroll_length * self.items_per_step
        return env_steps / rows * config.epochs

    def make_learner(self, networks: Any, spec: specs.EnvironmentSpec) -> core.Learner:
        config: Any = self.config
        return learners.MinibatchLearner(
            networks,
            self.prepare,
            self.loss,
            epochs=config.epochs,
            minibatch_size=config.minibatch_size,
            finish_fn=self.finish,
            **self.learner_settings(networks),
        )
