"""Several policies in one multi-agent environment. Each acts for its agents, as one batch, and learns alone.

```python
groups = group_agents(spec, lambda agent: "hunter" if agent.startswith("adversary") else "prey")
networks = MultiAgentNetworks(groups, {"hunter": …, "prey": …})
policy = MultiAgentPolicy(networks, {"hunter": …, "prey": …})       # acts for all agents of an environment
adder = MultiAgentAdder(groups, {"hunter": …, "prey": …})           # takes the time steps of all agents
learner = MultiAgentLearner(networks, {"hunter": …, "prey": …})
```

The B envs of an environment are B * A rows for a policy with A agents: first env 0's A rows, then env 1's, …
To its policy, adder and learner, a row is an env with one agent. An agent that waits for others is FIRST in
each time step, so it has no transitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import dm_env
import numpy as np
import torch
import tree
from torch import nn

from framework import core, specs
from framework.adders import Adder, ForkingAdder
from framework.config_checks import RaisedAs
from framework.learners import SGDLearner
from framework.parameters import arrays_of
from framework.replay import ReplaySample
from framework.types import FIRST, LAST, MID, MultiAgentTimeStep, Nest, Step, StepResult


class AgentGroup(NamedTuple):
    """The agents of one policy.

    Attributes:
      agents: their names.
      spec: the spec of each of them.
    """

    agents: tuple[str, ...]
    spec: specs.EnvironmentSpec

    def rows(self, nest: Mapping[str, Nest]) -> Nest:
        """Entries of agents, each `[B, ...]`, as rows `[B * A, ...]`."""
        parts = [nest[agent] for agent in self.agents]
        return tree.map_structure(lambda *leaves: _merge(_stack(leaves)), *parts)

    def split(self, rows: Nest) -> dict[str, Nest]:
        """The inverse of `rows`."""
        of_envs = self.of_envs(rows)
        return {
            agent: tree.map_structure(lambda leaf, index=index: leaf[:, index], of_envs)
            for index, agent in enumerate(self.agents)
        }

    def of_envs(self, rows: Nest) -> Nest:
        """Rows `[B * A, ...]`, arrays or tensors, as `[B, A, ...]`."""
        return tree.map_structure(lambda leaf: leaf.reshape(-1, len(self.agents), *leaf.shape[1:]), rows)

    def step_types(self, timestep: MultiAgentTimeStep) -> np.ndarray:
        """The step types of the rows. Agents end with their env, even where a wrapper ended its episode."""
        of_env = timestep.step_type
        types = {}
        for agent in self.agents:
            ended = np.where((of_env == LAST) & (timestep.agents[agent] == MID), LAST, timestep.agents[agent])
            types[agent] = np.where(of_env == FIRST, FIRST, ended)
        return self.rows(types)

    def timestep(self, timestep: MultiAgentTimeStep) -> dm_env.TimeStep:
        """The time step of the rows."""
        return dm_env.TimeStep(
            self.step_types(timestep),
            self.rows(timestep.reward),
            self.rows(timestep.discount),
            self.rows(timestep.observation),
        )


def _stack(leaves: Any) -> Any:
    return torch.stack(leaves, 1) if isinstance(leaves[0], torch.Tensor) else np.stack(leaves, 1)


def _merge(leaf: Any) -> Any:
    return leaf.reshape(-1, *leaf.shape[2:])


def group_agents(spec: specs.EnvironmentSpec, policy_of: Callable[[str], str]) -> dict[str, AgentGroup]:
    """The agents of each policy, by the policy's name.

    Args:
      spec: spec of a multi-agent environment.
      policy_of: function from an agent's name to the name of its policy.

    Raises:
      ValueError: The environment has one agent, or the agents of a policy have different specs.
    """
    names = specs.agents(spec)
    if not names:
        raise ValueError(
            f"environment spec: got the actions {spec.actions!r}, expected a dict with an entry for each "
            "agent, as for observations, rewards and discounts. Use a multi-agent environment, such as "
            "multi_agent:CartPole."
        )
    groups: dict[str, AgentGroup] = {}
    for agent in names:
        policy, own = policy_of(agent), specs.agent_spec(spec, agent)
        known = groups.setdefault(policy, AgentGroup((), own))
        if not _equal(known.spec, own):
            raise ValueError(
                f"policy {policy!r}: got agents {known.agents[0]!r} and {agent!r} with different specs, "
                "expected equal ones. Give each of them a policy of its own."
            )
        groups[policy] = known._replace(agents=(*known.agents, agent))
    return groups


def _equal(one: specs.EnvironmentSpec, other: specs.EnvironmentSpec) -> bool:
    """Whether two specs are equal, names of arrays aside."""
    return tree.map_structure(_nameless, one) == tree.map_structure(_nameless, other)


def _nameless(leaf: specs.Array) -> specs.Array:
    return leaf.replace(name=None)


class MultiAgentNetworks(nn.Module):
    """The networks of each policy, as children of these names, and the learner steps of each, as `steps`."""

    def __init__(self, groups: Mapping[str, AgentGroup], networks: Mapping[str, nn.Module]):
        super().__init__()
        self.groups = dict(groups)
        self.steps = nn.Module()
        for name, part in networks.items():
            if not name or "." in name or hasattr(self, name):
                raise ValueError(
                    f"policy: got the name {name!r}, expected one without dots that no attribute of "
                    "MultiAgentNetworks has. Rename the policy."
                )
            self.add_module(name, part)
            self.steps.register_buffer(name, torch.zeros((), dtype=torch.int64))

    def part(self, name: str) -> Any:
        """The networks of the policy `name`."""
        return self.get_submodule(name)

    def steps_of(self, name: str) -> torch.Tensor:
        """The number of learner steps of the policy `name`, int64."""
        return self.steps.get_buffer(name)


class MultiAgentPolicy(core.Policy):
    """Observations of all agents to actions of all agents, both dicts keyed by agent.

    Extras and states are dicts keyed by policy, `[B, A, ...]`. The recurrent state of an agent
    restarts with its own episode, as its learner restarts it.

    Args:
      networks: the networks of all policies.
      policies: by name.

    Attributes:
      groups: the agents of each policy.
      parts: the policies.
    """

    def __init__(self, networks: MultiAgentNetworks, policies: Mapping[str, core.Policy]):
        self._groups, self._policies, self._networks = networks.groups, dict(policies), networks
        self.groups, self.parts = self._groups, self._policies

    def loaded(self, progress: core.Progress) -> None:
        super().loaded(progress)
        for name, policy in self._policies.items():
            policy.loaded(progress._replace(version=int(self._networks.steps_of(name))))

    def initial_state(self, batch_size: int) -> Nest:
        return {
            name: group.of_envs(self._policies[name].initial_state(batch_size * len(group.agents)))
            for name, group in self._groups.items()
        }

    def step(self, observation: Nest, state: Nest) -> tuple[Nest, Nest, Nest]:
        actions: dict[str, Nest] = {}
        extras, states = {}, {}
        for name, group in self._groups.items():
            before = tree.map_structure(_merge, state[name])
            rows, extra, after = self._policies[name].step(group.rows(observation), before)
            actions.update(group.split(rows))
            extras[name], states[name] = group.of_envs(extra), group.of_envs(after)
        return actions, extras, states

    def begins(self, timestep: MultiAgentTimeStep) -> dict[str, np.ndarray]:
        return {
            name: group.of_envs(group.step_types(timestep)) == FIRST for name, group in self._groups.items()
        }

    def seed(self, seed: int) -> None:
        for index, policy in enumerate(self._policies.values()):
            policy.seed(seed + index)

    def save(self) -> Any:
        return {name: policy.save() for name, policy in self._policies.items()}

    def restore(self, state: Any) -> None:
        for name, policy in self._policies.items():
            policy.restore(state[name])


class MultiAgentAdder(ForkingAdder):
    """Gives each policy's adder the rows of its agents.

    Args:
      groups: the agents of each policy.
      adders: by the policy's name. The extras are a `MultiAgentPolicy`'s.
    """

    def __init__(self, groups: Mapping[str, AgentGroup], adders: Mapping[str, Adder]):
        super().__init__(list(adders.values()))
        self._groups, self._by_name = dict(groups), dict(adders)

    def add_first(self, timestep: MultiAgentTimeStep) -> None:
        for name, group in self._groups.items():
            self._by_name[name].add_first(group.timestep(timestep))

    def add(self, action: Nest, next_timestep: MultiAgentTimeStep, extras: Nest = ()) -> None:
        for name, group in self._groups.items():
            rows = tree.map_structure(_merge, extras[name]) if extras else ()
            self._by_name[name].add(group.rows(action), group.timestep(next_timestep), rows)


class MultiAgentLearner(core.Learner):
    """A learner for each policy. Each step updates one policy: its batch has the data `{name: data}`.

    Args:
      networks: the networks of all policies.
      learners: by the policy's name.
    """

    def __init__(self, networks: MultiAgentNetworks, learners: Mapping[str, SGDLearner]):
        self._networks, self._learners = networks, dict(learners)
        self._metrics: dict[str, Any] = {}  # The newest of each policy.

    def step(self, batch: ReplaySample) -> StepResult:
        ((name, data),) = batch.data.items()
        self._learners[name].env_steps = self.env_steps
        with RaisedAs(FloatingPointError, FloatingPointError, f"policy {name!r}: "):
            result = self._learners[name].step(batch._replace(data=data))
        self._networks.steps_of(name).add_(1)
        self._metrics.update({f"{name}/{metric}": value for metric, value in result.metrics.items()})
        self._metrics[f"{name}/steps"] = int(self._networks.steps_of(name))
        return StepResult(dict(self._metrics), result.priorities)

    def parameters(self) -> dict[str, dict[str, np.ndarray]]:
        for name, learner in self._learners.items():
            with RaisedAs(FloatingPointError, FloatingPointError, f"policy {name!r}: "):
                learner.parameters()  # On a GPU, the first that tells of a step that was not finite.
        return arrays_of({name: child.state_dict() for name, child in self._networks.named_children()})

    def save(self) -> dict[str, Any]:
        steps = {name: int(self._networks.steps_of(name)) for name in self._learners}
        return {"steps": steps, **{name: learner.save() for name, learner in self._learners.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        for name, learner in self._learners.items():
            learner.restore(state[name])
            self._networks.steps_of(name).fill_(state["steps"][name])


#: The entry of the extras that says which agents of a team move, bool`[B, A]`.
MOVED = "moved"


class TeamPolicy(core.Policy):
    """One policy for all agents of an environment. Extras and states are `[B, A, ...]`.

    Args:
      group: the agents.
      policy: acts for them, as rows `[B * A, ...]`.
    """

    def __init__(self, group: AgentGroup, policy: core.Policy):
        self._group, self._policy, self.variables = group, policy, policy.variables

    def loaded(self, progress: core.Progress) -> None:
        super().loaded(progress)
        self._policy.loaded(progress)

    def initial_state(self, batch_size: int) -> Nest:
        return self._group.of_envs(self._policy.initial_state(batch_size * len(self._group.agents)))

    def step(self, observation: Nest, state: Nest) -> tuple[Nest, Nest, Nest]:
        before = tree.map_structure(_merge, state)
        actions, extras, after = self._policy.step(self._group.rows(observation), before)
        return self._group.split(actions), self._group.of_envs(extras), self._group.of_envs(after)

    def seed(self, seed: int) -> None:
        self._policy.seed(seed)

    def save(self) -> Any:
        return self._policy.save()

    def restore(self, state: Any) -> None:
        self._policy.restore(state)


class TeamAdder(ForkingAdder):
    """Adds to the extras which agents move. The items of `adder` have the rows of all agents of an env."""

    def __init__(self, group: AgentGroup, adder: Adder):
        super().__init__([adder])
        self._group = group

    def add(self, action: Nest, next_timestep: MultiAgentTimeStep, extras: Nest = ()) -> None:
        moved = self._group.of_envs(self._group.step_types(next_timestep)) != FIRST
        super().add(action, next_timestep, {**extras, MOVED: moved})


def team_rows(group: AgentGroup, data: Step) -> Step:
    """Rows `[N, T, ...]` of whole envs, by a `TeamAdder`, as rows `[N * A, T, ...]` of their agents.

    Rows of an env follow each other. The mask is 0 where an agent waits for others. The `state` in the
    extras belongs to the first rows, `[N, A, ...]`.
    """
    size = len(group.agents)
    extras = {
        name: tree.map_structure(
            lambda leaf, axis=int(name != "state"): _merge(leaf.movedim(axis + 1, 1)), extra
        )
        for name, extra in data.extras.items()
    }
    start, mask = (leaf.repeat_interleave(size, 0) for leaf in (data.start_of_episode, data.mask))
    return Step(
        observation=group.rows(data.observation),
        action=group.rows(data.action),
        reward=group.rows(data.reward),
        discount=group.rows(data.discount),
        start_of_episode=start,
        extras=extras,
        mask=mask * extras.pop(MOVED),
    )
