"""The contracts of what an agent is given: the graph that it builds, and the loop that plays episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import launch
from framework.clock import Clock

if TYPE_CHECKING:
    from framework.core import Agent
    from framework.environments.base import BatchedEnvironment
    from framework.specs import EnvironmentSpec


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
