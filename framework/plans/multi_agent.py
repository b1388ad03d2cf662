"""Plans of several policies in one multi-agent environment: the base of their agents, and their worker."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from framework import adders, core, specs
from framework.datasets import Dataset
from framework.learners import LossContext, LossOutput, SGDLearner
from framework.multi_agent import (
    AgentGroup,
    MultiAgentAdder,
    MultiAgentLearner,
    MultiAgentNetworks,
    MultiAgentPolicy,
    group_agents,
)
from framework.networks import as_numpy
from framework.plans.plan_worker import PlanLearner
from framework.plans.rollout_worker import RolloutWorker
from framework.replay import EmbeddedClient, ReplaySample, Table
from framework.torch_agents import OffPolicyAgent, OnPolicyAgent, TorchAgent
from framework.types import StepResult
from framework.workers.worker import Setup, make_tables


class OwnTables(NamedTuple):
    """The tables of an on-policy policy in a worker, and what writes to them and reads them."""

    tables: list[Table]
    client: EmbeddedClient
    dataset: Dataset


class MultiAgentWorker(RolloutWorker):
    """A `RolloutWorker` whose envs have several agents, with an adder for each policy.

    On-policy policies have tables in the worker, the others in the replay node.
    """

    def __init__(self, setup: Setup, *, replay: Any = None, seed: int = 0, **options: Any):
        agent: MultiAgentPlanAgent = setup.agent  # type: ignore[assignment]
        self._own: dict[str, OwnTables] = {}
        for name, (group, part) in agent.sized_parts(setup.spec, setup.config.envs_per_actor).items():
            if isinstance(part, OnPolicyAgent):
                part.config = dataclasses.replace(part.config, device="cpu", devices={})
                unrolls = setup.config.envs_per_actor * len(group.agents)
                if part.items_per_step != unrolls:
                    raise ValueError(
                        f"items_per_step: got {part.items_per_step} in policy {name!r}, expected {unrolls}, "
                        "the unrolls of a worker."
                    )
                tables = make_tables(dataclasses.replace(setup, agent=part, spec=group.spec), seed)
                client = EmbeddedClient(tables, concurrent=False)
                self._own[name] = OwnTables(tables, client, part.make_dataset(client))
        if replay is None:  # A table of its own is empty between two calls.
            replay = next(iter(self._own.values())).client
        super().__init__(setup, replay=replay, seed=seed, **options)

    def make_adder(self, client: Any) -> adders.Adder:
        agent: MultiAgentPlanAgent = self.agent  # type: ignore[assignment]
        clients = {name: self._own[name].client if name in self._own else client for name in agent.parts}
        return super().make_adder(clients)

    def sample(self) -> dict[str, ReplaySample]:  # type: ignore[override]
        """Collects one unroll of every env. The items of policies that are not on-policy go to replay.

        If the replay server is lost meanwhile and restarts, the unrolls begin again, with new episodes.

        Returns:
          A batch of each on-policy policy, in numpy: leaves `[B * A, T + 1, ...]`.

        Raises:
          BudgetSpent: Fewer env steps are left than an unroll may need.
        """
        with self._busy:
            while not self._collect(self.agent.unroll_length):
                for table in (table for own in self._own.values() for table in own.tables):
                    table.reset()  # Some agents' unrolls may be complete.
            samples = {name: next(own.dataset) for name, own in self._own.items()}
        return {name: each._replace(data=as_numpy(each.data)) for name, each in samples.items()}

    def close(self) -> None:
        super().close()
        for own in self._own.values():
            own.dataset.close()


class MultiAgentPlanAgent(TorchAgent):
    """A plan that trains several policies, each by its own algorithm; see `agents.ppo_dqn`.

    Attributes:
      parts: by the policy's name, the agent that makes its networks, policy, adder and learner. At least one
        of them is on-policy. At most one is off-policy, and its tables are the replay node's.
    """

    worker_class = MultiAgentWorker
    for_worker = core.Agent.for_worker  # The worker changes the settings of its parts.
    parts: Mapping[str, TorchAgent]

    @abc.abstractmethod
    def policy_of(self, agent: str) -> str:
        """The name of the policy of an agent of the environment."""

    def steps(self, learner: PlanLearner) -> dict[str, Callable[[ReplaySample], StepResult | None]]:
        """For each policy, the function that makes a learner step on a batch.

        The new parameters of an on-policy policy are published at once. If all of its agents waited for
        others in all of their unrolls, there is nothing to learn: no step is made, and the result is None.
        """

        def step(name: str, sample: ReplaySample) -> StepResult | None:
            if isinstance(self.parts[name], OnPolicyAgent) and not sample.data.mask.any():
                return None
            result = learner.step(sample._replace(data={name: sample.data}))
            if isinstance(self.parts[name], OnPolicyAgent):
                learner.publish()
            return result

        return {name: functools.partial(step, name) for name in self.parts}

    @property
    def unroll_length(self) -> int:
        lengths = {part.unroll_length for part in self.parts.values() if isinstance(part, OnPolicyAgent)}
        if len(lengths) != 1:
            raise ValueError(f"unroll_length: got {sorted(lengths)} in the policies, expected one number.")
        return lengths.pop()

    @property
    def items_per_step(self) -> int:
        return self.num_envs

    def groups(self, spec: specs.EnvironmentSpec) -> dict[str, AgentGroup]:
        """The agents of each policy; see `group_agents`."""
        groups = group_agents(spec, self.policy_of)
        if groups.keys() != self.parts.keys():
            raise ValueError(
                f"policies: got agents for {sorted(groups)}, expected some for each of {sorted(self.parts)}. "
                f"The agents of the environment are {', '.join(specs.agents(spec))}."
            )
        return groups

    def sized_parts(
        self, spec: specs.EnvironmentSpec, num_envs: int
    ) -> dict[str, tuple[AgentGroup, TorchAgent]]:
        """Each policy's group, and its part for `num_envs` envs of all its agents."""
        off_policy = [name for name, part in self.parts.items() if isinstance(part, OffPolicyAgent)]
        if len(off_policy) > 1:
            raise ValueError(f"parts: got {', '.join(off_policy)}, expected one off-policy agent at most.")
        sized: dict[str, tuple[AgentGroup, TorchAgent]] = {}
        for name, group in self.groups(spec).items():
            part = self.parts[name].for_program(num_envs * len(group.agents))
            _check_part(name, part)
            if isinstance(part, OffPolicyAgent):
                # Two rounds of the workers: the items of one, while the learner makes the steps of the other.
                items = 2 * self.unroll_length * self.num_envs * len(group.agents)
                burst = max(part.config.insert_burst, items)
                part.config = dataclasses.replace(part.config, insert_burst=burst)
            sized[name] = group, part
        return sized

    def describe_inputs(self, spec: specs.EnvironmentSpec) -> list[str]:
        groups = self.groups(spec)
        return [
            f"{name}: {line}"
            for name, part in self.parts.items()
            for line in part.describe_inputs(groups[name].spec)
        ]

    def make_networks(self, spec: specs.EnvironmentSpec) -> MultiAgentNetworks:
        groups = self.groups(spec)
        made = {name: part.make_networks(groups[name].spec) for name, part in self.parts.items()}
        return MultiAgentNetworks(groups, made)

    def make_policy(self, networks: MultiAgentNetworks, evaluation: bool = False) -> MultiAgentPolicy:
        policies = {
            name: part.make_policy(networks.part(name), evaluation) for name, part in self.parts.items()
        }
        return MultiAgentPolicy(networks, policies)

    def make_learner(self, networks: MultiAgentNetworks, spec: specs.EnvironmentSpec) -> core.Learner:
        learners: dict[str, SGDLearner] = {}
        for name, (group, part) in self.sized_parts(spec, self.num_envs).items():
            learners[name] = part.make_learner(networks.part(name), group.spec)  # type: ignore[assignment]
        return MultiAgentLearner(networks, learners)

    def make_tables(self, spec: specs.EnvironmentSpec) -> list[Table]:
        """Those of the replay node."""
        parts = self.sized_parts(spec, self.num_envs).values()
        off_policy = [(group, part) for group, part in parts if isinstance(part, OffPolicyAgent)]
        return [table for group, part in off_policy for table in part.make_tables(group.spec)]

    def make_adder(self, client: Any, spec: specs.EnvironmentSpec) -> adders.Adder:
        """`client`: a client for each policy, by its name."""
        parts = self.sized_parts(spec, self.num_envs)
        made = {name: part.make_adder(client[name], group.spec) for name, (group, part) in parts.items()}
        return MultiAgentAdder({name: group for name, (group, _) in parts.items()}, made)

    def make_dataset(self, client: Any) -> Dataset:
        (part,) = [part for part in self.parts.values() if isinstance(part, OffPolicyAgent)]
        return part.make_dataset(client)

    def loss(self, networks: MultiAgentNetworks, batch: Any, context: LossContext) -> LossOutput:
        """The loss of one policy, whose batch has the data `{name: data}`."""
        ((name, data),) = batch.data.items()
        return self.parts[name].loss(networks.part(name), batch._replace(data=data), context)

    def session(self, spec: specs.EnvironmentSpec, num_envs: int = 1, seed: int = 0) -> NoReturn:
        """Raises ValueError: a session has one policy."""
        raise ValueError(
            f"session: got {type(self).__name__}, which trains several policies, expected an agent with one. "
            "Make a session of each of its `parts`, or a program."
        )

    def build(self, graph: core.Graph) -> None:
        graph.add_evaluator(graph.add_plan(graph.add_replay()))


def _check_part(name: str, part: TorchAgent) -> None:
    """Raises ValueError for settings that the workers of a plan do not follow."""
    settings: dict[str, tuple[Any, Any]] = {
        "episodes_per_batch": (part.episodes_per_batch, None),
        "max_policy_lag": (part.max_policy_lag or 0, 0),
        "environment_wrappers": (list(part.environment_wrappers()), []),
    }
    for setting, (value, expected) in settings.items():
        if value != expected:
            raise ValueError(
                f"{setting}: got {value} in policy {name!r}, expected {expected} for a plan, whose workers "
                "collect unrolls of common envs with the newest parameters. Use the agent by itself."
            )
