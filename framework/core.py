"""The contracts of actors, policies, learners, workers and agents.

One iteration of acting and one of learning, in the order of the calls:

```python
timestep = environment.reset()                      # [B, ...], every env FIRST
actor.observe_first(timestep)
while True:
    action = actor.select_action(timestep.observation)
    timestep = environment.step(action)
    actor.observe(action, timestep)
    actor.update()

for sample in dataset:                              # ReplaySample, batch first
    result = learner.step(sample)
    if result.priorities is not None:
        client.update_priorities(table, sample.info.key, result.priorities)
```

Actors and learners do not refer to each other. They exchange data through replay and a variable source only.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import launch
from framework.graph_contract import Graph as Graph
from framework.graph_contract import Loop as Loop
from framework.runs.presets import find_preset
from framework.types import FIRST, Gradients, Nest, StepResult
from framework.types import Progress as Progress

if TYPE_CHECKING:
    import dm_env
    import numpy as np
    import torch
    from typing_extensions import Self

    from framework.adders import Adder
    from framework.datasets import Dataset
    from framework.learners.distributed import LearnerGroup
    from framework.replay import ReplaySample, Table
    from framework.replay.contracts import ReplayClient
    from framework.specs import EnvironmentSpec

_LOG = logging.getLogger(__name__)
State = TypeVar("State")
# The config of an agent and the spec of its environments to networks with all of its parameters.
NetworksFn = Callable[[Any, "EnvironmentSpec"], Any]


class Actor(abc.ABC):
    """Acts for the B envs of one batched environment at once."""

    @abc.abstractmethod
    def select_action(self, observation: Nest) -> Nest:
        """Chooses one action per env: nest of `[B, ...]` to nest of `[B, ...]`."""

    @abc.abstractmethod
    def observe_first(self, timestep: dm_env.TimeStep) -> None:
        """Takes the time step of `environment.reset()`; every env is FIRST."""

    @abc.abstractmethod
    def observe(self, action: Nest, next_timestep: dm_env.TimeStep) -> None:
        """Takes the environment's response to `action`.

        Envs whose `next_timestep` is FIRST have just been reset: the environment ignored their action, and
        the step is not a transition.
        """

    @abc.abstractmethod
    def update(self, wait: bool = False) -> None:
        """Pulls newer parameters if there are any. With `wait`, blocks until the source answers."""

    def flush_pending(self) -> None:
        """Hands experience to replay that the actor has staged. Called before a pause; does not wait."""
        return


class Policy(abc.ABC):
    """A pure step from observations to actions. It owns no adder, no variables and no clock.

    Attributes:
      variables: names of the variables of the networks that acting needs. Empty means all.
      progress: of the parameters that were loaded last.
      takes_tensors: whether `step` also takes tensors, and then returns the action on the same device.
    """

    variables: tuple[str, ...] = ()
    takes_tensors: bool = False
    progress: Progress = Progress()

    @abc.abstractmethod
    def initial_state(self, batch_size: int) -> Nest:
        """The recurrent state of `batch_size` envs at the start of an episode; `()` if there is none.

        Row i is the state of env i of the program. An inference server acts for the envs of several actors
        at once. A property that distinguishes envs, such as the exploration rate of each, therefore belongs
        in this state: the position of an env in a batch has no meaning.
        """

    @abc.abstractmethod
    def step(self, observation: Nest, state: Nest) -> tuple[Nest, Nest, Nest]:
        """`(observation [B, ...], state)` to `(action [B, ...], extras [B, ...], next state)`.

        Observations, actions and extras are numpy arrays; with `takes_tensors`, observations may be tensors,
        and the action then is. The policy chooses the type of the state. The networks may be on a device
        other than the CPU.
        """

    def loaded(self, progress: Progress) -> None:
        """Takes note that newer parameters have been copied into the networks.

        Override it, and call the base's, where they have to be copied on: to a device, or into a model.
        """
        self.progress = progress

    def begins(self, timestep: Any) -> Nest:
        """Where an episode begins in `timestep`, so that the state restarts: bool`[B]`.

        A policy of several agents, whose episodes begin at different times, returns a nest of masks instead:
        an upper part of the state's structure, each mask with the first axes of the leaves below it. An
        inference server does not call this. It restarts the whole state of an env with the env's episode.
        """
        return timestep.step_type == FIRST

    def seed(self, seed: int) -> None:
        """Seeds the policy's random choices. A policy without random choices does not override this."""
        return None

    def save(self) -> Any:
        """The state of the policy's random choices, for `restore`; None if it makes none."""
        return None

    def restore(self, state: Any) -> None:
        """Restores the random choices from what `save` returned."""
        return None


class Saveable(abc.ABC, Generic[State]):
    """An object whose state is part of a checkpoint."""

    @abc.abstractmethod
    def save(self) -> State:
        """A snapshot that later changes of this object do not affect."""

    @abc.abstractmethod
    def restore(self, state: State) -> None:
        """Continues from what `save` returned, here or in another process."""


class Learner(Saveable):
    """Updates parameters from batches. The caller owns the data, publishing, logs and checkpoints.

    Attributes:
      env_steps: steps of the program's clock, for schedules. The caller sets it before each step.
      device: device of its parameters. Several learners of a program need it.
    """

    env_steps: int = 0
    device: torch.device

    @abc.abstractmethod
    def step(self, batch: ReplaySample) -> StepResult:
        """One update from a `ReplaySample` whose leaves are `[N, ...]` or `[N, T, ...]`."""

    @abc.abstractmethod
    def parameters(self) -> dict[str, dict[str, np.ndarray]]:
        """The arrays of each variable, by its name and its entries: `{"torso": {"weight": …}}`.

        They may be views of the learner's own memory, so copy them before the next `step`. The names, shapes
        and dtypes are always the same. In torch, a variable is a child of the networks, with the entries of
        its state dict; `framework.parameters.arrays_of` makes arrays of tensors on any device.
        """

    def gradients(self, batch: ReplaySample) -> Gradients:
        """The gradients of the loss on `batch`, which another learner can `apply`."""
        raise NotImplementedError(f"{type(self).__name__} cannot compute gradients without applying them.")

    def apply(self, gradients: Gradients) -> StepResult:
        """One update with the gradients of another learner's batch."""
        raise NotImplementedError(f"{type(self).__name__} cannot apply the gradients of another learner.")

    def distribute(self, group: LearnerGroup) -> None:
        """Joins the other processes of a `framework.learners.LearnerGroup`, for all later steps."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot learn in several processes; use num_learners=1."
        )


class Worker(abc.ABC):
    """The object in a node of a program that does its work one step at a time."""

    def ready(self) -> bool:
        """Whether `step()` can run without blocking. The serial engine asks until it is `finished()`."""
        return True

    def finished(self) -> bool:
        """Whether the work is done. `run` then ends, and the serial engine stops calling `step`."""
        return False

    @abc.abstractmethod
    def step(self) -> None:
        """One unit of work. It may block, for example on replay, but must end soon after a stop."""

    def run(self) -> None:
        """Steps until the work is done or the program is stopped. All engines but serial call this."""
        stopped = launch.stop_event()
        while not (stopped.is_set() or self.finished()):
            self.step()


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
