"""The contracts of the parts that an agent makes: actors, policies and learners, and of the workers in nodes.

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
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import launch
from framework.types import FIRST, Gradients, Nest, Progress, StepResult

if TYPE_CHECKING:
    import dm_env
    import numpy as np
    import torch

    from framework.learners.distributed import LearnerGroup
    from framework.replay import ReplaySample

State = TypeVar("State")


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
