"""The environments and actors of an actor node: all envs at once, or two halves that alternate.

```text
half 0     |env|adder|  ....  |env|adder|  ....  |env|adder|        ....  waits for its turn
half 1        ....  |env|adder|  ....  |env|adder|
inference  |--1--|  |--0--|   |--1--|  |--0--|                      always of the half that does not step
```

Each half has its own environment, adder and loop, like a smaller actor. The halves share the source of their
actions. Halves are faster where inference can overlap stepping: with an inference server, a GPU, environments
in processes, or networks so large that torch releases the interpreter's lock.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tree

import launch
from framework import core, specs
from framework.actors import PolicyActor
from framework.actors.environment_loop import EnvironmentLoop
from framework.actors.inference_client import InferenceActor, LocalPort, Port, connect
from framework.programs.run_config import RunConfig
from framework.programs.seeding import derive_seed
from framework.types import Nest
from framework.variables import VariableClient


@dataclasses.dataclass
class Half:
    """All or some of an actor's envs, with their actor and loop.

    Attributes:
      environment: the batched environment of these envs.
      actor: chooses their actions and owns the adder.
      should_update: whether the actor requests newer parameters at each step.
      loop: drives the environment with the actor.
    """

    environment: Any
    actor: PolicyActor | InferenceActor
    should_update: bool = True
    loop: EnvironmentLoop = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Makes a new loop, which resets all envs at its first step."""
        self.loop = EnvironmentLoop(self.environment, self.actor, should_update=self.should_update)


class Acting:
    """Steps the envs of one actor node, one `Half` at a time, in turn.

    Args:
      halves: one half with all envs, or two. With two, the actors are `InferenceActor`s.
      versioned: the object whose `version` is that of the parameters that acted last; None without
        parameters. Also an attribute.
      hold_period: actions are not computed ahead for steps that are a multiple of this number, because an
        unroll begins there and may need newer parameters. None always computes ahead.
      close: called last by `close`.
    """

    def __init__(
        self,
        halves: Sequence[Half],
        versioned: VariableClient | Port | None = None,
        hold_period: int | None = None,
        close: Callable[[], None] = lambda: None,
    ):
        self.halves = list(halves)
        self._next = self.halves[0]
        self._askers = [half.actor for half in halves if isinstance(half.actor, InferenceActor)]
        self.versioned = versioned
        self._hold_period = hold_period
        self._close = close
        self._steps = 0

    def ready(self) -> bool:
        """Whether the next half can take a step without waiting."""
        adder = self._next.actor.adder
        return adder is None or adder.ready()

    def step(self, max_steps: int | None = None) -> tuple[int, dict[str, Any] | None]:
        """One batched step of the next half.

        Returns:
          The number of transitions, and the result of `EnvironmentLoop.step`.
        """
        half = self._next
        if len(self._askers) > 1:
            self._askers[self._steps % 2].request()  # Does nothing if the request was made ahead.
            self._steps += 1
            self._next = self.halves[self._steps % 2]
            if self._hold_period is None or self._steps % self._hold_period:
                self._askers[self._steps % 2].request()  # Computed while this half steps.
        before = half.loop.num_steps
        finished = half.loop.step(max_steps)
        return half.loop.num_steps - before, finished

    def update(self) -> None:
        """Pulls the newest parameters for all envs."""
        for half in self.halves:
            half.actor.update(wait=True)

    def flush(self, timeout: float | None) -> None:
        """Waits until all items are in the tables, at most `timeout` seconds for each half."""
        for adder in self._adders():
            adder.flush(timeout=timeout)

    def close_adders(self, timeout: float | None) -> int:
        """Closes the adders; returns how many items were dropped."""
        return sum(adder.close(timeout=timeout) for adder in self._adders())

    def replace_adders(self, make_adder: Callable[[], Any]) -> int:
        """Replaces the adders and starts new episodes; returns how many items the old adders lost."""
        lost = self.close_adders(timeout=0.0)
        for half in self.halves:
            half.actor.adder = make_adder()
            half.start()
        return lost

    def _adders(self) -> list[Any]:
        return [half.actor.adder for half in self.halves if half.actor.adder is not None]

    def take_seconds(self) -> dict[str, float]:
        """See `EnvironmentLoop.take_seconds`. With two halves, `select_action` is time spent waiting."""
        parts = [half.loop.take_seconds() for half in self.halves]
        return {key: sum(part[key] for part in parts) for key in parts[0]}

    def save(self) -> Any:
        """The state of the policy's random choices."""
        return self.halves[0].actor.save()

    def restore(self, state: Any) -> None:
        """Restores the random choices from what `save` returned."""
        self.halves[0].actor.restore(state)

    def close(self) -> None:
        """Closes the actors, which disconnect from inference, then the environments."""
        for actor in self._askers:
            actor.close()
        self._close()
        for half in self.halves:
            half.environment.close()


def make_acting(
    agent: core.Agent,
    make_environment: Callable[[int, int], Any],
    spec: specs.EnvironmentSpec,
    config: RunConfig,
    *,
    learner: Any,
    inference: Any,
    name: str,
    seed: int,
    make_adder: Callable[[], Any],
) -> Acting:
    """Makes the `Acting` for `config.inference`. The arguments are those of `ActorWorker`."""
    envs = config.envs_per_actor
    alternates, served = config.inference.startswith("alternating"), config.inference.endswith("server")
    sizes = [envs - envs // 2, envs // 2] if alternates else [envs]
    offsets = [0, sizes[0]][: len(sizes)]
    in_step = agent.max_policy_lag is not None
    versioned: VariableClient | Port | None = None
    ports: list[Port] = []
    close: Callable[[], None] = lambda: None  # noqa: E731
    if served:
        for index, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
            port_name = f"{name}.{index}"
            ports.append(connect(inference, port_name, size, offset, envs, config.inference_messages))
        versioned = ports[0] if learner is not None else None
    else:
        networks = agent.make_networks(spec)
        policy = agent.make_policy(networks)
        variables = None
        if learner is not None:
            variables = versioned = VariableClient(learner, networks, policy, config.update_period)
    if alternates and not served:
        policy.seed(seed)
        run = None
        if launch.get_node_context().engine != "serial":
            pool = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-inference")
            run, close = pool.submit, functools.partial(pool.shutdown, cancel_futures=True)
        for size, offset in zip(sizes, offsets, strict=True):
            state = _rows(policy.initial_state(envs), slice(offset, offset + size))
            ports.append(LocalPort(policy, state, variables, run))
        versioned = ports[0] if learner is not None else None

    halves = []
    for index, size in enumerate(sizes):
        environment = make_environment(size, derive_seed(seed, f"half-{index}") if alternates else seed)
        adder = make_adder()
        actor: PolicyActor | InferenceActor
        if ports:
            actor = InferenceActor(ports[index], adder, size)
        else:
            actor = PolicyActor(policy, adder, variables, envs, seed)
        # Actors with a limited policy lag pull parameters only at the start of an unroll. Halves share their
        # parameters, so only one half requests newer ones, once per step of all envs.
        updates = not in_step and index == 0
        halves.append(Half(environment, actor, updates))
    hold_period = None
    if in_step and learner is not None:
        hold_period = len(sizes) * agent.unroll_length
    return Acting(halves, versioned, hold_period, close)


def _rows(state: Nest, rows: slice) -> Nest:
    return tree.map_structure(lambda leaf: leaf[rows], state)
