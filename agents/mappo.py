"""MAPPO: PPO for a team, with a critic that sees the observations of all its agents (Yu et al., 2022).

Each agent of an env is a row of the batch. Agents act on their own observations only: those of the others
are put beside them in the learner, so no policy ever gets them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import tree
from torch import nn

from agents.ppo import PPO, PPOConfig, PPOPolicy
from framework import adders, core, networks
from framework import config_checks as check
from framework.learners import LossContext, Prepared
from framework.multi_agent import AgentGroup, TeamAdder, TeamPolicy, group_agents, team_rows
from framework.replay import ReplaySample
from framework.replay.contracts import ReplayClient
from framework.runs.presets import HERE, Preset
from framework.specs import EnvironmentSpec
from framework.types import Nest, Step

State = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class MAPPOConfig(PPOConfig):
    """Settings of MAPPO, in addition to `PPOConfig`'s."""

    joint_critic: bool = True  # The critic sees the observations of all agents. False: independent PPO.
    share_parameters: bool = True  # All agents have one policy and one critic. False: each has its own.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, (False,), "shared")  # Policy and critic see different things.
        check.one_of(self, (None,), "episodes_per_batch")


class _Actor(networks.ActorCritic):
    """An `ActorCritic` without the value."""

    def __init__(self, config: MAPPOConfig, spec: EnvironmentSpec):
        super().__init__(spec, **{**config.network_settings(), "shared": True})
        self.value_head = networks.MLP(1)  # It returns the features, which are left out.


def _critic(config: MAPPOConfig, observation_spec: Nest) -> nn.Sequential:
    encoder = networks.ObservationEncoder(observation_spec)
    activation, gain = config.activation, math.sqrt(2.0)
    body = networks.MLP(encoder.output_size, config.hidden_sizes, activation=activation, orthogonal_gain=gain)
    return nn.Sequential(encoder, body, networks.MLP(body.output_size, (), 1, orthogonal_gain=1.0))


class MAPPONetworks(nn.Module):
    """The variables of MAPPO.

    Args:
      config: settings of the networks.
      spec: the spec of one agent.
      num_agents: A.
    """

    kl_coefficient: torch.Tensor
    group: AgentGroup

    def __init__(self, config: MAPPOConfig, spec: EnvironmentSpec, num_agents: int):
        super().__init__()
        self._num_agents, own = num_agents, spec.observations
        seen = {"own": own, "joint": (own,) * num_agents if config.joint_critic else ()}
        count = 1 if config.share_parameters else num_agents
        self.actions = networks.make_actions(spec.actions)
        self.actors = nn.ModuleList([_Actor(config, spec) for _ in range(count)])
        self.value_critics = nn.ModuleList([_critic(config, seen) for _ in range(count)])
        self.normalizer = networks.ObservationNormalizer(own, config.normalize_observations)
        self.reward_scale = networks.RewardScale()
        self.register_buffer("kl_coefficient", torch.tensor(config.initial_kl_coefficient))

    def initial_state(self, batch_size: int) -> State:
        return self.actors[0].initial_state(batch_size)  # type: ignore[operator]

    def agents(self, rows: int) -> torch.Tensor:
        """The index of the agent of each row `[N * A]`."""
        return torch.arange(rows, device=self.kl_coefficient.device) % self._num_agents

    def act(self, observation: Nest, state: State) -> tuple[Any, State]:
        """One step of the rows `[B * A, ...]` of B envs, by their own observations."""
        each = [actor.act(observation, state) for actor in self.actors]  # type: ignore[operator]
        agents = self.agents(len(tree.flatten(observation)[0]))
        policies, states = zip(*each, strict=True)
        return self._policy_of(policies, agents), _of_agents(states, agents)

    def forward(self, observation: Any, state: State = (), starts: Any = None) -> tuple[Any, torch.Tensor]:
        """As `ActorCritic.forward`, of `own` observations, `joint` ones of all, and the `agent` of rows."""
        own, agents = observation["own"], observation["agent"]
        seen = {"own": own, "joint": observation["joint"]}
        policies = [actor(own, state, starts)[0] for actor in self.actors]
        values = [critic(seen).squeeze(-1) for critic in self.value_critics]
        return self._policy_of(policies, agents), _of_agents(values, agents)

    def _policy_of(self, policies: Sequence[Any], agents: torch.Tensor) -> Any:
        if len(policies) == 1:
            return policies[0]
        parameters = [self.actions.parameters(policy) for policy in policies]
        return self.actions.distribution(_of_agents(parameters, agents))


def _of_agents(nests: Sequence[Any], agents: torch.Tensor) -> Any:
    """Of each agent's results for all rows, `[*agents.shape, ...]`, those for its own rows."""
    if len(nests) == 1:
        return nests[0]

    def pick(*leaves: torch.Tensor) -> torch.Tensor:
        stacked = torch.stack(leaves)
        index = agents.reshape(1, *agents.shape, *[1] * (stacked.dim() - 1 - agents.dim()))
        return stacked.gather(0, index.expand(1, *stacked.shape[1:])).squeeze(0)

    return tree.map_structure(pick, *nests)


class MAPPO(PPO):
    """PPO for a team of agents with equal specs.

    ```python
    agent = MAPPO(MAPPOConfig(unroll_length=25))
    program = programs.make_program(agent, "pettingzoo:mpe.simple_spread_v3", programs.RunConfig())
    ```
    """

    config: MAPPOConfig = MAPPOConfig()
    carries_returns = False  # Running returns, of which rewards are scaled, begin with each unroll.

    def group(self, spec: EnvironmentSpec) -> AgentGroup:
        return group_agents(spec, lambda _: "team")["team"]

    def describe_inputs(self, spec: EnvironmentSpec) -> list[str]:
        return super().describe_inputs(self.group(spec).spec)

    def session(self, spec: EnvironmentSpec, num_envs: int = 1, seed: int = 0) -> NoReturn:
        """Raises ValueError: a session has one agent."""
        raise ValueError("session: got MAPPO, which acts for a team, expected an agent. Make a program.")

    def make_networks(self, spec: EnvironmentSpec) -> Any:
        group = self.group(spec)
        members = ("actions", "normalizer", "reward_scale", "kl_coefficient", "agents")
        made = self.custom_networks(
            group.spec,
            lambda config, own: MAPPONetworks(config, own, len(group.agents)),
            (*members, "initial_state", "act", "forward"),
        )
        made.group = group
        return made

    def make_policy(self, networks: Any, evaluation: bool = False) -> core.Policy:  # type: ignore[override]
        return TeamPolicy(networks.group, PPOPolicy(networks, evaluation))

    def make_adder(self, client: ReplayClient, spec: EnvironmentSpec) -> adders.Adder:
        return TeamAdder(self.group(spec), super().make_adder(client, spec))

    def prepare(self, networks: Any, batch: ReplaySample, context: LossContext) -> Prepared:
        batch = batch._replace(data=team_rows(networks.group, batch.data))
        return super().prepare(networks, batch, context)

    def observations(self, networks: Any, data: Step) -> Nest:
        """What `MAPPONetworks.forward` takes of rows `[N * A, T + 1]`."""
        own, size = networks.normalizer(data.observation), len(networks.group.agents)

        def of(index: int) -> Nest:
            return tree.map_structure(lambda leaf: leaf[index::size].repeat_interleave(size, 0), own)

        joint = tuple(of(index) for index in range(size)) if self.config.joint_critic else ()
        agents = networks.agents(len(data.mask)).unsqueeze(-1).expand(data.mask.shape)
        return {"own": own, "joint": joint, "agent": agents}

    def finish(
        self, networks: Any, batch: ReplaySample, prepared: Prepared, context: LossContext
    ) -> dict[str, torch.Tensor]:
        batch = batch._replace(data=team_rows(networks.group, batch.data))
        return super().finish(networks, batch, prepared, context)


_PAPER = "Yu et al. (2022), train_mpe_spread.sh"

PRESETS: Mapping[str, Preset] = {
    # The paper makes 20 million steps.
    "pettingzoo:mpe.simple_spread_v3": Preset(
        agent={
            "unroll_length": 25,
            "epochs": 10,
            "minibatch_size": None,
            "learning_rate": 7e-4,
            "entropy_coefficient": 0.01,
            "max_gradient_norm": 10.0,
            "activation": "relu",
            "normalize_observations": True,
            "normalize_rewards": True,
        },
        run={
            "num_actors": 1,
            "envs_per_actor": 128,
            "max_env_steps": 1_000_000,
            "evaluate_period": 100_000,
            "num_evaluation_episodes": 100,
            "learner_log_period": 10,
        },
        source=_PAPER,
        sources={_PAPER: "envs_per_actor", HERE: "normalize_observations normalize_rewards max_env_steps"},
    ),
}
