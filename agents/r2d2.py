"""R2D2: recurrent Q-learning from replayed sequences (Kapturowski et al., 2019).

An item of replay is a sequence of rows of one env, with the state that the actor's LSTM had before the first
row. The learner unrolls the network over the whole sequence. The first `burn_in` rows only bring the state up
to date; the `unroll_length` rows after them are learned from, and the last row serves to bootstrap:

```text
row           0 ... b-1 | b ... b+U-1 | b+U            b = burn_in, U = unroll_length
state        ^ stored   |             |
               burn-in  |   learned   |  bootstrap
next item               period ...
```

Sequences continue across the ends of episodes, where the state restarts. Each step of an env is therefore
learned from `unroll_length / period` times as often as an item is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tree
from torch import nn

from framework import adders, losses, networks, replay, specs
from framework import config_checks as check
from framework.adders import PriorityFn
from framework.learners import LossContext, LossOutput, schedules
from framework.losses.masking import where_counted
from framework.networks import as_tensors
from framework.replay.contracts import ReplayClient
from framework.runs.presets import ATARI_RUN, Preset
from framework.specs import EnvironmentSpec
from framework.torch_agents import OffPolicyAgent, OffPolicyConfig, TorchPolicy, previous_action_and_reward
from framework.types import Nest, Step


@dataclass(frozen=True)
class SequenceConfig(OffPolicyConfig):
    """Settings of agents that learn from replayed sequences, in addition to `OffPolicyConfig`'s.

    An *item* is one sequence. A learned step is drawn samples_per_insert * unroll_length / period times.
    """

    unroll_length: int = 40  # Rows of a sequence that are learned from.
    burn_in: int = 20  # Rows before them, which only bring the stored state up to date.
    period: int = 20  # Env steps from the start of one sequence to the start of the next.
    previous_action_and_reward: bool = False  # The policy also sees the last action and (clipped) reward.
    priority_eta: float = 0.9  # Priority of a sequence: this * largest + (1 - this) * mean error.
    lstm_size: int | None = 64  # Width of the LSTM. None: a feed-forward network.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "unroll_length", "period", "lstm_size")
        check.at_least(self, 0, "burn_in")
        check.fraction(self, "priority_eta")
        check.ordered(self, "period", "unroll_length")
        check.one_of(self, (0,), "hindsight_goals")  # Goals are replaced in transitions only.


def sequence_adder(
    agent: Any, client: ReplayClient, spec: EnvironmentSpec, priority_fn: PriorityFn | None, **options: Any
) -> adders.Adder:
    """The adder of an agent with a `SequenceConfig`: sequences go on over the ends of episodes."""
    config = agent.config
    return adders.SequenceAdder(
        client,
        config.burn_in + config.unroll_length + 1,
        config.period,
        adders.EndOfEpisodeBehavior.CONTINUE,
        extras_of_first_row=agent.extras_of_first_row,
        priority_fns={agent.items_table: priority_fn},
        max_in_flight_items=config.insert_burst,
        observation_spec=spec.observations,
        **options,
    )


def unroll_inputs(agent: Any, data: Step) -> tuple[Nest, Nest, torch.Tensor, int]:
    """The arguments of `RecurrentEncoder.unroll` for sequences `[N, T, ...]` of such an agent."""
    state = data.extras["state"] if agent.has_memory else ()
    observation = adders.restacked(data.observation, data.mask.shape[1])
    return observation, state, data.start_of_episode, agent.config.burn_in


@dataclass(frozen=True)
class R2D2Config(SequenceConfig):
    """Settings of R2D2, in addition to `SequenceConfig`'s."""

    max_replay_size: int = 10_000  # Maximum number of sequences; the oldest are removed first.
    min_replay_size: int = 50  # Sequences in replay before learning begins.
    batch_size: int = 32  # Sequences per learner step.
    samples_per_insert: float = 16.0  # Times a sequence is drawn on average.
    # Sequences by which inserts may lead or trail the ratio; also the limit in flight.
    insert_burst: int = 64

    # Targets.
    n_step: int = 5  # Rewards summed before bootstrapping; fewer at the end of a sequence.
    targets: str = "n_step"  # "n_step", "watkins" (traces, cut by exploration) or "peng" (uncut, biased).
    trace_lambda: float = 0.95  # With traces: 0 bootstraps after one step, 1 as late as possible.
    double: bool = True  # The online network chooses the next action, the target network rates it.
    rescale_values: bool = True  # Learns h(value), close to a square root: for returns of any size.

    # Prioritized replay.
    priority_exponent: float = 0.9  # 0 draws uniformly, 1 proportionally to the priority.
    actor_priorities: bool = False  # Actors compute the priorities of new sequences; else the largest so far.
    importance_sampling_exponent: float = 0.6  # Exponent of the importance weights; 1 is a full correction.

    # Learning.
    max_gradient_norm: float | None = 40.0  # Larger gradients are scaled down to this.

    # Exploration.
    epsilon_start: float = 1.0  # Chance of a random action before learning begins.
    epsilon_end: float = 0.4  # Chance of a random action after the decay, of the first env.
    epsilon_decay: int = 10_000  # Env steps from `epsilon_start` to `epsilon_end`.
    epsilon_ladder: float = 7.0  # Env i of B explores with epsilon ** (1 + this * i / (B - 1)).
    evaluation_epsilon: float = 0.0  # Chance of a random action in evaluations.

    # Networks.
    torso: str = "nature"  # Image layers: nature (the paper's), data_efficient or shallow (smaller), or deep.
    hidden_sizes: tuple[int, ...] = (64,)  # Layers before the LSTM for observations without images.
    head_sizes: tuple[int, ...] = (64,)  # Hidden layers after the LSTM.
    dueling: bool = True  # A stream for the state's value, another for the actions' advantages.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "epsilon_decay", "hidden_sizes", "head_sizes")
        check.at_least(self, 0, "priority_exponent", "epsilon_ladder")
        check.fraction(self, "trace_lambda", "importance_sampling_exponent")
        check.fraction(self, "epsilon_start", "epsilon_end", "evaluation_epsilon")
        check.one_of(self, ("n_step", "watkins", "peng"), "targets")
        check.one_of(self, networks.CONVOLUTIONS, "torso")


class R2D2Networks(nn.Module):
    """The only variable of R2D2: `q_network`."""

    def __init__(self, config: R2D2Config, spec: EnvironmentSpec):
        super().__init__()
        num_actions = specs.num_discrete_actions(spec.actions)
        self.actions = networks.Actions(spec.actions)
        layers = config.hidden_sizes, config.lstm_size, config.head_sizes, config.dueling, config.torso
        self.q_network = networks.RecurrentQNetwork(spec.observations, num_actions, *layers)


class R2D2Policy(TorchPolicy):
    """Epsilon-greedy, with one epsilon per env. Its extras are the LSTM's `state` before each step.

    With `actor_priorities` they also have `values` of the action and of the greedy one, `[B, 2]`.

    Args:
      networks: the networks, which the policy reads at each step.
      config: settings of the epsilon schedule.
      evaluation: whether epsilon is `config.evaluation_epsilon` for all envs.
    """

    def __init__(self, networks: R2D2Networks, config: R2D2Config, evaluation: bool = False):
        super().__init__(networks, networks.actions, variables=("q_network",))
        self._q_network, self._gives_values = networks.q_network, config.actor_priorities
        self._epsilon = schedules.linear(config.epsilon_start, config.epsilon_end, config.epsilon_decay)
        self._ladder = config.epsilon_ladder
        if evaluation:
            self._epsilon, self._ladder = (lambda env_steps: config.evaluation_epsilon), 0.0

    def initial_state(self, batch_size: int) -> Nest:
        """Each env's exponent of epsilon, float64[B], and the state of the networks."""
        exponent = torch.linspace(1.0, 1.0 + self._ladder, batch_size, dtype=torch.float64)
        return exponent, self._q_network.initial_state(batch_size)

    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        exponent, memory = state
        values, after = self._q_network.step(observation, memory)
        epsilon = (self._epsilon(self.progress.env_steps) ** exponent).to(self.device)
        drawn = networks.epsilon_greedy(values, observation, epsilon, self.random)
        extras: dict[str, Nest] = {"state": memory} if memory else {}
        if self._gives_values:
            best = networks.mask_values(values, observation).amax(-1, keepdim=True)
            extras["values"] = torch.cat([values.gather(-1, drawn.unsqueeze(-1)), best], -1)
        return drawn, extras or (), (exponent, after)


class R2D2(OffPolicyAgent):
    """Recurrent Q-learning for one discrete action per env.

    ```python
    agent = R2D2(R2D2Config(lstm_size=128, burn_in=40))
    config = programs.RunConfig(num_actors=2, envs_per_actor=8)
    program = programs.make_program(agent, environment_factory, config)
    ```
    """

    config: R2D2Config = R2D2Config()
    memory_field = "lstm_size"
    target_names = ("q_network",)
    takes_action_masks = True

    def environment_wrappers(self) -> Sequence[Any]:
        """Adds the last action and reward to the observation with `previous_action_and_reward`."""
        return previous_action_and_reward(self.config)

    def env_steps_per_item(self) -> int:
        return self.config.period

    def make_networks(self, spec: EnvironmentSpec) -> R2D2Networks:
        members = ("actions", "q_network.initial_state", "q_network.step", "q_network.unroll")
        return self.custom_networks(spec, R2D2Networks, members)

    def make_policy(self, networks: R2D2Networks, evaluation: bool = False) -> R2D2Policy:
        return R2D2Policy(networks, self.config, evaluation)

    def make_sampler(self) -> Any:
        return replay.selectors.Prioritized(self.config.priority_exponent)

    def make_adder(
        self, client: ReplayClient, spec: EnvironmentSpec, priority_fn: PriorityFn | None = None
    ) -> adders.Adder:
        if priority_fn is None and self.config.actor_priorities:
            priority_fn = self.initial_priorities
        sees = priority_fn != self.initial_priorities
        return sequence_adder(self, client, spec, priority_fn, priorities_see_observations=sees)

    def errors(
        self, q_network: Any, target: Any, data: Step
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Errors `[N, T]` of the rows after the burn-in, where they count, and the values `[N, T, A]`."""
        config, start, inputs = self.config, self.config.burn_in, unroll_inputs(self, data)
        values = q_network.unroll(*inputs).float()
        actions = data.action[:, start:].long().unsqueeze(-1)
        taken = values.gather(-1, actions).squeeze(-1)
        with torch.no_grad():
            rated = target.unroll(*inputs).float()
            learned = tree.map_structure(lambda leaf: leaf[:, start:], inputs[0])
            best = networks.mask_values(values if config.double else rated, learned)
            best = best.argmax(-1, keepdim=True)
            next_values, rated_taken = (rated.gather(-1, each).squeeze(-1) for each in (best, actions))
            targets = self.targets(data, next_values, rated_taken, (best == actions).squeeze(-1))
        counted = losses.transition_mask(data.mask[:, start:])
        return where_counted(targets - taken, counted), counted, values

    def targets(
        self, data: Step, next_values: torch.Tensor, taken_values: torch.Tensor, greedy: torch.Tensor
    ) -> torch.Tensor:
        """Targets `[N, T]` of the rows after the burn-in.

        Args:
          data: the rows `[N, burn_in + T]`.
          next_values: `[N, T]` values of each row from which the row before it bootstraps.
          taken_values: `[N, T]` values of each row's action.
          greedy: bool`[N, T]`, whether that action is the greedy one.
        """
        config, start, mask = self.config, self.config.burn_in, data.mask[:, self.config.burn_in :]
        rewards = losses.clipped_rewards(data.reward[:, start:], config.reward_clip)
        discounts = config.discount * data.discount[:, start:].float()
        if config.rescale_values:
            next_values, taken_values = map(losses.inverse_value_rescaling, (next_values, taken_values))
        if config.targets == "n_step":
            targets = losses.n_step_returns(rewards, discounts, next_values, mask, config.n_step)
        else:
            inputs = (rewards, discounts, taken_values, next_values, mask, config.trace_lambda)
            if config.targets == "watkins":
                targets = losses.watkins_q_lambda(*inputs, greedy)
            else:
                targets = losses.peng_q_lambda(*inputs)
        return losses.value_rescaling(targets) if config.rescale_values else targets

    def initial_priorities(self, items: Step) -> np.ndarray:
        """The priorities `[k]` of new sequences, from the values that their actor acted with."""
        data, start = as_tensors(items._replace(observation=())), self.config.burn_in
        taken, best = data.extras["values"][:, start:].unbind(-1)
        # A closing row has no values. A truncated episode bootstraps from the row before it.
        before = torch.cat([best[:, :1], best[:, :-1]], 1)
        best = torch.where(data.mask[:, start:] > 0, best, before)
        counted = losses.transition_mask(data.mask[:, start:])
        errors = where_counted(self.targets(data, best, taken, best == taken) - taken, counted)
        return self.priorities(errors, counted).numpy()

    def priorities(self, errors: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """The priorities float64`[N]` of sequences with these errors `[N, T]`, of which `counted` count."""
        return losses.item_priorities(losses.sequence_priorities(errors, counted, self.config.priority_eta))

    def loss(self, networks: R2D2Networks, batch: replay.ReplaySample, context: LossContext) -> LossOutput:
        """The loss of a batch of `Step`s `[N, burn_in + unroll_length + 1, ...]`."""
        config = self.config
        errors, counted, values = self.errors(networks.q_network, context.targets["q_network"], batch.data)
        weights = context.importance_weights(batch.info, config.importance_sampling_exponent)
        total = counted.sum()
        loss = 0.5 * (weights.unsqueeze(1) * errors.square()).sum() / total.clamp(min=1)
        metrics = {
            "q_mean": losses.masked_mean(values.mean(-1), counted),
            "td_error": losses.masked_mean(errors.abs(), counted),
            "importance_weight": weights.mean(),
            "transitions": total,
        }
        return LossOutput(loss, metrics, self.priorities(errors, counted), weight=total)


PRESETS: Mapping[str, Preset] = {
    # Chosen on seeds 101 and 102. Adam's epsilon matters: with 1e-3, 41 of 500 after 40,000 steps.
    "testing:CartPoleWithoutVelocities": Preset(
        agent={
            "unroll_length": 20,
            "burn_in": 10,
            "period": 20,
            "learning_rate_decay": 300_000,
            "learning_rate_end": 0.02,
            "epsilon_end": 0.1,
        },
        run={
            "num_actors": 1,
            "envs_per_actor": 8,
            "max_env_steps": 300_000,
            "target_return": 475.0,
            "evaluate_period": 25_000,
        },
    ),
    "testing:Memory": Preset(
        agent={
            "unroll_length": 20,
            "burn_in": 10,
            "period": 20,
            "samples_per_insert": 8.0,
            "learning_rate_decay": 200_000,
            "learning_rate_end": 0.02,
            "hidden_sizes": (32,),
            "lstm_size": 32,  # None, a network without memory, stays at chance, 0.5.
        },
        run={
            "num_actors": 1,
            "envs_per_actor": 8,
            "max_env_steps": 200_000,
            "target_return": 0.99,
            "evaluate_period": 25_000,
            "num_evaluation_episodes": 100,
        },
    ),
    # These were not searched. Each step is learned from 8 times, as with DQN's preset.
    "minatar:*": Preset(
        {
            "unroll_length": 20,
            "burn_in": 5,
            "period": 20,
            "samples_per_insert": 8.0,
            "learning_rate": 3e-4,
            "learning_rate_decay": 1_000_000,
            "learning_rate_end": 0.1,
            "target_update_rate": 0.01,
            "epsilon_decay": 100_000,
            "lstm_size": 128,
            "head_sizes": (128,),
        },
        {"num_actors": 1, "envs_per_actor": 8, "max_env_steps": 1_000_000, "evaluate_period": 50_000},
    ),
    # 5 learner steps of 64 sequences for 256 x 260 env steps, that is 1,664 new sequences.
    "atari:*": Preset(
        {
            "discount": 0.997,
            "unroll_length": 80,
            "burn_in": 40,
            "period": 40,
            "previous_action_and_reward": True,
            "batch_size": 64,
            "samples_per_insert": 0.19,
            "max_replay_size": 100_000,
            "min_replay_size": 5_000,
            "importance_sampling_exponent": 0.0,
            "actor_priorities": True,
            "learning_rate": 1e-4,
            "adam_epsilon": 1e-3,
            "target_update_period": 2_500,
            "target_update_rate": 1.0,
            "epsilon_start": 0.4,
            "lstm_size": 512,
            "head_sizes": (512,),
        },
        {**ATARI_RUN, "environment_options": {"sticky_actions": 0.0}, "num_actors": 2},
        "Kapturowski et al. (2019), section 2.3 and table 2",
        {"Espeholt et al. (2020), SEED RL's r2d2": "min_replay_size"},
    ),
}
