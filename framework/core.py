"""The contracts of agents, of their parts, and of the graph that an agent builds.

The contracts of actors, policies, learners and workers are in `framework.components`; this module has their
names, too.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import launch
from framework.clock import Clock
from framework.components import Actor as Actor
from framework.components import Learner as Learner
from framework.components import Policy as Policy
from framework.components import Saveable as Saveable
from framework.components import Worker as Worker
from framework.runs.presets import find_preset
from framework.types import Progress as Progress

if TYPE_CHECKING:
    from typing_extensions import Self

    from framework.adders import Adder
    from framework.datasets import Dataset
    from framework.environments.base import BatchedEnvironment
    from framework.replay import Table
    from framework.replay.contracts import ReplayClient
    from framework.specs import EnvironmentSpec

_LOG = logging.getLogger(__name__)
# The config of an agent and the spec of its environments to networks with all of its parameters.
NetworksFn = Callable[[Any, "EnvironmentSpec"], Any]


class Loop(Protocol):
    """Plays episodes; see `framework.actors.EnvironmentLoop`."""

    environment: BatchedEnvironment

    def run_episodes(self, num_episodes: int) -> dict[str, Any]:
        """Plays whole episodes from a reset and returns their metrics."""


class Graph(Protocol):
    """The nodes of a program. `Agent.build` adds them and joins them by their handles.

    In the arguments of a node, a handle becomes a client of its node. A method returns None where the agent
    or the settings of the program leave the node out.

    A method may be called several times, each time with another `name`: the label of the nodes and of their
    rows of metrics, and the name of their part of a checkpoint. `agent` makes the parts of these nodes; None
    is the agent of the learner whose `variables` they take, or else the program's agent. All environments
    have the wrappers of the agent of the program.

    Attributes:
      spec: the `EnvironmentSpec` of one env.
      clock: says what periods, budgets, schedules, and progress count: env steps, or the steps of the learner
        in a program without actors, plan, and nodes of your own. `clock.count = "learner_steps"` says so
        where a node of your own does not act.
      counter: the node that counts `env_steps` and `learner_steps` (`NAME_steps` of a learner `NAME`).
      monitor: the node that takes rows of metrics: `monitor.write(label, row)`.
      checkpointer: the node that keeps states, `put(name, state)` and `get(name)`, and writes them with the
        checkpoints of the run; None without a directory.
    """

    spec: EnvironmentSpec
    clock: Clock
    counter: launch.Handle
    monitor: launch.Handle
    checkpointer: launch.Handle | None

    def add_replay(
        self, shards: int | None = None, *, agent: Agent | None = None, name: str = "replay"
    ) -> launch.Handle | None:
        """Adds a replay server with the agent's tables, or several, each with a part of the items.

        The client of several is a `replay.ShardedClient`. Without `shards`, the program's settings say how
        many.
        """

    def add_learner(
        self,
        replay: launch.Handle | None,
        *,
        agent: Agent | None = None,
        name: str = "learner",
        clients: Mapping[str, launch.Handle] | None = None,
    ) -> launch.Handle | None:
        """Adds the learner, and the other learners of its group.

        In its nodes, the agent's `clients` are clients of the nodes `clients`, by the same names.
        """

    def add_variable_source(self, learner: launch.Handle | None) -> launch.Handle | None:
        """Adds the nodes that serve the parameters of `learner`; returns `learner` if it serves them."""

    def add_inference(
        self, variables: launch.Handle | None, *, agent: Agent | None = None, name: str = "inference"
    ) -> launch.Handle | None:
        """Adds the nodes that act for all actors; `add_actors` calls this."""

    def add_actors(
        self,
        replay: launch.Handle | None,
        variables: launch.Handle | None,
        *,
        agent: Agent | None = None,
        name: str = "actor",
    ) -> None:
        """Adds the actors, which write to `replay` and take their parameters from `variables`."""

    def add_plan(
        self,
        replay: Any = None,
        *,
        agent: Agent | None = None,
        learners: Mapping[str, Agent] | None = None,
    ) -> Any:
        """Adds the workers and the learner of a plan; the workers write to `replay` if it is given.

        With `learners`, agents by name, there is a learner of each of them, and worker i acts for the learner
        number i modulo their number. `Agent.plan` then gets a dict of learners, and `replay` may be a dict of
        replays by the same names.

        Returns:
          The learner's handle; a dict of handles by name with `learners`.
        """

    def add_evaluator(
        self, variables: launch.Handle | None, *, agent: Agent | None = None, name: str = "evaluator"
    ) -> None:
        """Adds the evaluator, which plays greedily with the parameters of `variables`."""

    def add_node(self, name: str, node: launch.ProgramNode) -> launch.Handle:
        """Adds a node of your own to the group `name`. A `Worker` in it runs on every engine."""


class Agent(abc.ABC):
    """Makes the parts of an agent. `framework.programs` connects them in a graph.

    On every engine, each method is called in the process that uses the part:

    ```python
    environment = environments.make(name, wrappers=agent.environment_wrappers())
    spec = specs.make_environment_spec(environment)
    networks = agent.make_networks(spec)
    tables = agent.make_tables(spec)                # in the replay node
    adder = agent.make_adder(client, spec)          # in each actor
    policy = agent.make_policy(networks)
    dataset = agent.make_dataset(client)            # in the learner
    learner = agent.make_learner(networks, spec)
    ```
    """

    # `(config, spec)` to the networks in place of the agent's own, for agents that take one.
    networks_fn: NetworksFn | None = None
    num_envs: int = 1  # in the whole program
    num_learners: int = 1
    rank: int = 0  # the index of this node's learner
    clients: Mapping[str, Any] = {}  # In a learner's node, clients of other nodes; see `Graph.add_learner`.
    dataset: str | None = None  # What it learns from in a program without actors; see `RunConfig.dataset`.
    made_by: str | None = None  # `module:function` that made the agent; None if its class did.
    # Modules that are imported once for all processes of the program, as torch is, not by each of them.
    preload: Sequence[str] = ()
    worker_class: Any = None  # The class of the objects in the nodes of a plan. None is `RolloutWorker`.

    @classmethod
    def preset(cls, environment: str) -> Any:
        """The agent's config for `environment`: `PPO(PPO.preset("gymnasium:CartPole-v1"))`.

        A warning says where the settings come from if there is no preset for `environment`.

        Raises:
          TypeError: The agent has no config.
        """
        config: Any = getattr(cls(), "config", None)
        if not dataclasses.is_dataclass(config) or isinstance(config, type):
            raise TypeError(f"preset: got {cls.__name__}, which has no config, expected an agent with one.")
        preset, line = find_preset(cls, environment)
        if line:
            _LOG.warning("%s", line)
        return dataclasses.replace(config, **preset.agent)

    @abc.abstractmethod
    def make_networks(self, spec: EnvironmentSpec) -> Any:
        """What holds all of the agent's parameters, on the CPU.

        It is a torch module, whose children are the variables, or a nest of numpy arrays, as
        `Learner.parameters` returns. Newer parameters are copied into its tensors or arrays.
        """

    @abc.abstractmethod
    def make_policy(self, networks: Any, evaluation: bool = False) -> Policy:
        """The policy that acts with `networks`: exploring, or greedy if `evaluation`."""

    @abc.abstractmethod
    def make_tables(self, spec: EnvironmentSpec) -> list[Table]:
        """The `replay.Table`s of this agent; their rate limiters set the replay ratio."""

    @abc.abstractmethod
    def make_adder(self, client: ReplayClient, spec: EnvironmentSpec) -> Adder:
        """The adder that turns the experience of B envs into items of the tables."""

    @abc.abstractmethod
    def make_dataset(self, client: ReplayClient) -> Dataset:
        """An iterator of `ReplaySample` on the learner's device."""

    @abc.abstractmethod
    def make_learner(self, networks: Any, spec: EnvironmentSpec) -> Learner:
        """The learner that updates `networks`."""

    def plan(self, workers: Sequence[Any], learner: Any) -> Any:
        """The agent's algorithm as a `flow.Flow`. An agent that defines this is a plan; see docs/flow.md.

        The items of the plan are not used: the learner counts, publishes and logs its own steps.

        Args:
          workers: the `flow.Node`s of the `worker_class`.
          learner: the `PlanLearner`, in the process of the plan. A dict of them by name, if the graph's
            `add_plan` got several `learners`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no plan.")

    def build(self, graph: Graph) -> None:
        """Adds the nodes of the program to `graph`. Override it to add, replace or leave out nodes."""
        if type(self).plan is not Agent.plan:
            graph.add_evaluator(graph.add_plan())
            return
        replay = graph.add_replay()
        variables = graph.add_variable_source(graph.add_learner(replay))
        if self.dataset is None:
            graph.add_actors(replay, variables)
        graph.add_evaluator(variables)

    def for_program(self, num_envs: int, num_learners: int = 1, rank: int = 0) -> Self:
        """A copy with the sizes of the program. `make_program` and the learners call this.

        Args:
          num_envs: number of envs of all actors together.
          num_learners: number of learner processes. Each learns from an equal part of every batch.
          rank: rank of the learner in this node, from 0 to `num_learners - 1`.

        Raises:
          ValueError: This agent cannot learn in `num_learners` processes.
        """
        agent = copy.copy(self)
        agent.num_envs, agent.num_learners, agent.rank = num_envs, num_learners, rank
        if num_learners > 1:
            agent.check_shards()
        return agent

    def for_dataset(self, path: str) -> Self:
        """A copy that learns from the episodes at `path`, without actors; see `RunConfig.dataset`.

        Raises:
          ValueError: This agent cannot.
        """
        raise ValueError(
            f"dataset: got {path!r}, expected None: {type(self).__name__} learns from what its own actors "
            "do. Use an off-policy agent."
        )

    def decided(self, config: Any, recorded: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """A copy whose settings leave nothing to be decided, and a line about each decision.

        `make_program` calls this before nodes start.

        Args:
          config: the program's `RunConfig`.
          recorded: fields of the agent's config in the folder of a run that goes on; empty for a new one.

        Raises:
          ValueError: This machine cannot do what a setting asks for.
        """
        return self, []

    def for_worker(self, num_envs: int) -> Self:
        """A copy for a worker of a plan with tables of its own: its batches have its `num_envs` envs."""
        return self.for_program(num_envs)

    def for_learner(self, clients: Mapping[str, Any] | None) -> Self:
        """A copy with these `clients`. The learners of a program call this."""
        agent = copy.copy(self)
        agent.clients = dict(clients or {})
        return agent

    def check_shards(self) -> None:
        """Raises ValueError if a batch cannot be divided among `num_learners` learners."""
        raise ValueError(
            f"num_learners: got {self.num_learners}, expected 1. {type(self).__name__} cannot learn in "
            "several processes."
        )

    def play(self, loop: Loop, policy: Policy, num_episodes: int) -> dict[str, Any]:
        """Plays the episodes of an evaluation; the evaluator and `repertory eval` call this.

        Args:
          loop: drives an actor that stores nothing.
          policy: the greedy policy of that actor.
          num_episodes: number of episodes.

        Returns:
          `episode_return`, `episode_length` and `env`, `[k]` for k episodes, and arrays of other names, whose
          means are logged too; see `EnvironmentLoop.run_episodes`.
        """
        return loop.run_episodes(num_episodes)

    def score(self, row: Mapping[str, Any]) -> tuple[float, ...]:
        """What the best evaluation has the largest of, by the evaluator's `row`: the mean return."""
        return (row["episode_return"],)

    def describe_inputs(self, spec: EnvironmentSpec) -> Sequence[str]:
        """What the networks take the observations of `spec` for, one line for each leaf; empty by default."""
        return ()

    def environment_wrappers(self) -> Sequence[Any]:
        """The wrappers of this agent's environments, innermost first; see `environments.make`."""
        return ()

    @property
    def max_policy_lag(self) -> int | None:
        """Learner steps by which an actor's parameters may lag behind. None does not limit the lag.

        With a limit, an actor collects unroll k (k = 0, 1, …), `unroll_length` steps of all envs, with one
        version of the parameters. It does not begin unroll k before the learner has made k - lag steps:

        ```text
        lag 0    actor   |unroll 0|.......|unroll 1|.......|unroll 2|      always the newest: on-policy
                 learner |........|step 1 |........|step 2 |........|
        lag 1    actor   |unroll 0|unroll 1|unroll 2|unroll 3|             one step behind, both busy
                 learner |........|step 1  |step 2  |step 3  |
        ```
        """
        return None

    @property
    def unroll_length(self) -> int:
        """Steps of an env in an unroll, for agents with a `max_policy_lag`."""
        raise NotImplementedError(f"{type(self).__name__} has no unroll_length.")

    @property
    def episodes_per_batch(self) -> int | None:
        """Whole episodes in a learner step, for agents with a `max_policy_lag` that learn from episodes.

        Unroll k of an actor then ends when the actor has finished its part of the episodes of k + 1 batches,
        and `unroll_length` is the largest number of steps in an episode. None: unrolls of that length.
        """
        return None
