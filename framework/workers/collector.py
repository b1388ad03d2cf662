"""What steps the envs of a node: a collector, or two that take turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from framework import core
from framework.actors import EnvironmentLoop, EnvironmentLoopObserver, PolicyActor
from framework.actors.inference_client import ServerPort
from framework.adders import Adder
from framework.environments.base import BatchedEnvironment
from framework.environments.tensor import as_arrays
from framework.own_settings import seeded
from framework.replay.errors import ServerClosed, ServerLost
from framework.runs.parts import make_observers
from framework.variables import VariableClient
from framework.workers.worker import Setup, derive_seed


class Steps(NamedTuple):
    """What a call of a collector made.

    Attributes:
      made: number of env steps. The steps that begin an episode do not count.
      ended: results of the episodes that ended, see `EnvironmentLoop.collect`; None if none did.
      calls: number of steps of every env.
    """

    made: int
    ended: dict[str, Any] | None
    calls: int = 1


class Collector:
    """Steps B envs with a policy, and writes what happens to an adder.

    ```python
    collector = Collector(environment, agent.make_policy(networks), agent.make_adder(client, spec), seed=1)
    for _ in range(100):
        collector.step()
    ```

    Args:
      environment: the batched environment of the B envs.
      policy: chooses the actions; of an inference server, its `ServerPort`.
      adder: takes the experience. None stores nothing.
      variables: updates the networks of the policy. None does not update them.
      seed: seeds the policy's random choices. None does not seed them.
      make_adder: makes the next adder, after the server of the first one was lost.
      offset: index of the first of these envs among all envs that act with this kind of policy.
      total: number of all these envs. None means `offset` and B.
      observers: add metrics of each episode.
      updates: whether each step asks for newer parameters. If False, only `update` does.

    Attributes:
      environment: the environment.
      actor: chooses the actions and owns the adder.
      loop: drives the environment with the actor.
      lost_items: number of items that were in flight when a replay server was lost.
    """

    def __init__(
        self,
        environment: BatchedEnvironment,
        policy: core.Policy,
        adder: Adder | None,
        *,
        variables: VariableClient | None = None,
        seed: int | None = None,
        make_adder: Callable[[], Adder | None] | None = None,
        offset: int = 0,
        total: int | None = None,
        observers: Sequence[EnvironmentLoopObserver] = (),
        updates: bool = True,
    ):
        self.environment, self._make_adder = environment, make_adder
        self._port = policy if isinstance(policy, ServerPort) else None
        self._variables = self._port or variables
        self.actor = PolicyActor(policy, adder, self._variables, environment.num_envs, seed, offset, total)
        self.loop = EnvironmentLoop(environment, self.actor, observers=observers, should_update=False)
        self.lost_items, self._updates = 0, updates
        self._told = (0, 0)  # Env steps and steps of every env that were returned.
        self._renewed_at = -1  # Env steps at the last `recover`.

    @property
    def version(self) -> int:
        """Version of the acting parameters; -1 without parameters."""
        return -1 if self._variables is None else self._variables.version

    @property
    def adders(self) -> list[Adder]:
        """The adder, if there is one."""
        return [] if self.actor.adder is None else [self.actor.adder]

    def ready(self) -> bool:
        """Whether `step` can run without waiting for replay."""
        adder = self.actor.adder
        return adder is None or adder.ready()

    def room(self) -> int:
        """Steps of every env that run without waiting for replay, after `ready` was True: at least 1."""
        adder = self.actor.adder
        return adder.room() if isinstance(adder, Adder) else 1

    def step(self, max_steps: int | None = None) -> Steps:
        """One step of every env, at most `max_steps` env steps; see `EnvironmentLoop.collect`."""
        return self.collect(1, max_steps)

    def collect(
        self,
        num_steps: int,
        max_steps: int | None = None,
        until: Callable[[], bool] | None = None,
        until_end: bool = False,
    ) -> Steps:
        """Up to `num_steps` steps of every env; see `EnvironmentLoop.collect`.

        The result has what was made before an error of the last call, too.
        """
        loop, ended = self.loop, None
        if max_steps is not None:
            max_steps -= loop.num_steps - self._told[0]
        if max_steps is None or max_steps > 0:
            if self._updates:
                if isinstance(self._variables, VariableClient):
                    self._variables.passed(num_steps - 1)  # One update stands for the updates of all steps.
                self.actor.update()
            ended = loop.collect(num_steps, max_steps, until, until_end)
        made, calls = loop.num_steps - self._told[0], loop.num_calls - self._told[1]
        self._told = loop.num_steps, loop.num_calls
        return Steps(made, ended, calls)

    def ask_ahead(self) -> None:
        """Asks an inference server for the next actions, which it computes until `step` needs them."""
        if self._port is not None and self.loop.timestep is not None:
            self._port.request(self.loop.timestep.observation, self.actor.state)

    def update(self) -> None:
        """Waits for the newest parameters, and acts with them from now on."""
        self.actor.update(wait=True)

    def reset(self) -> None:
        """Begins new episodes with the next step. The adder drops the unwritten part of the open ones."""
        for adder in self.adders:
            adder.reset()
        self.loop.restart()

    def recover(self, error: ServerClosed) -> bool:
        """Begins new episodes with a new adder after the loss of the replay server.

        Returns:
          False if the server was stopped, or was lost again before a step was made.
        """
        if not isinstance(error, ServerLost) or self._renewed_at == self.loop.num_steps:
            return False
        self._renewed_at = self.loop.num_steps
        self.renew()
        return True

    def renew(self) -> None:
        """Begins new episodes with a new adder, and counts the items that the old one has lost."""
        self.lost_items += self.close_adder(0.0)
        self.actor.adder = None if self._make_adder is None else self._make_adder()
        self.loop.restart()

    def close_adder(self, timeout: float) -> int:
        """Closes the adder, after which nothing is stored; returns the number of items that were dropped."""
        adder, self.actor.adder = self.actor.adder, None
        return 0 if adder is None else adder.close(timeout=timeout)

    def losses(self) -> dict[str, int]:
        """The `lost_items`, and the `dropped_episodes` of the loop (`EnvironmentLoop.num_dropped`)."""
        return {"lost_items": self.lost_items, "dropped_episodes": self.loop.num_dropped}

    def take_seconds(self) -> dict[str, float]:
        """The seconds since the last call, by what they were spent for; see `EnvironmentLoop`."""
        seconds, self.loop.seconds = self.loop.seconds, dict.fromkeys(self.loop.seconds, 0.0)
        return seconds

    def close(self) -> None:
        """Closes the environment, and the port of an inference server."""
        self.environment.close()
        if self._port is not None:
            self._port.close()  # Last, because a server that is gone is an error.


class Turns:
    """Two collectors that take turns: one steps while an inference server acts for the other.

    ```text
    half 0     |env|adder|  ....  |env|adder|  ....  |env|adder|        ....  waits for its turn
    half 1        ....  |env|adder|  ....  |env|adder|
    inference  |--1--|  |--0--|   |--1--|  |--0--|                      always of the half that does not step
    ```

    This is faster where inference can overlap stepping: with slow environments, or large networks.

    Args:
      collectors: their actors have ports of inference servers. A step is a step of one of them.
      may_ask_ahead: whether the step after this one acts with the same parameters, so that its actions can be
        computed during this one.
    """

    def __init__(self, collectors: Sequence[Collector], may_ask_ahead: Callable[[], bool]):
        self._mine, self._other = collectors  # It is the turn of the first; the other is next.
        self._both, self._may_ask_ahead = collectors, may_ask_ahead

    version = property(lambda self: self._mine.version)
    adders = property(lambda self: [adder for each in self._both for adder in each.adders])

    def ready(self) -> bool:
        return self._mine.ready()

    def room(self) -> int:
        return 1  # The next step is the other collector's.

    def step(self, max_steps: int | None = None) -> Steps:
        """As `Collector.step`, of the collector whose turn it is."""
        return self.collect(1, max_steps)

    def collect(self, num_steps: int, max_steps: int | None = None, *_: Any) -> Steps:
        """One step, as `step`: the next one is the other collector's."""
        self._mine.ask_ahead()
        if self._may_ask_ahead():
            self._other.ask_ahead()
        steps = self._mine.step(max_steps)
        self._mine, self._other = self._other, self._mine
        return steps

    def update(self) -> None:
        for each in self._both:
            each.update()

    def recover(self, error: ServerClosed) -> bool:
        if recovers := self._mine.recover(error):
            self._other.renew()
        return recovers

    def close_adder(self, timeout: float) -> int:
        return sum(each.close_adder(timeout) for each in self._both)

    def losses(self) -> dict[str, int]:
        return _sum(*(each.losses() for each in self._both))

    def take_seconds(self) -> dict[str, float]:
        return _sum(*(each.take_seconds() for each in self._both))

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # An error of one must not leave the other open.
            for each in self._both:
                stack.callback(each.close)


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: one[name] + other[name] for name in one}


def flush_pending(adders: Iterable[Any]) -> None:
    """Hands staged time steps to replay before a wait; a user's own adder may have none."""
    for adder in adders:
        if hasattr(adder, "flush_pending"):
            adder.flush_pending()


def make_collector(
    setup: Setup,
    index: int,
    seed: int,
    learner: Any,
    make_policy: Callable[[Any], core.Policy],
    make_adder: Callable[[], Any],
) -> Collector:
    """The collector of worker `index`, which has the policy.

    Args:
      setup: makes the environment and the networks.
      index: index of the worker.
      seed: of the networks, the policy and the environments.
      learner: the variable source. None for an agent without parameters.
      make_policy: makes the policy of the networks.
      make_adder: makes an adder.
    """
    envs, variables = setup.config.envs_per_actor, None
    environment = setup.make_environment(envs, seed)
    with seeded(seed):
        networks = setup.agent.make_networks(setup.spec)
        if environment.device is not None and hasattr(networks, "to"):
            networks.to(environment.device)  # The actor acts where its envs are.
        policy = make_policy(networks)
    if learner is not None:
        variables = VariableClient(learner, networks, policy, setup.config.update_period)
    options = {"variables": variables, "seed": seed}
    return _make(setup, policy, environment, index * envs, make_adder, options)


def make_served(
    setup: Setup,
    name: str,
    index: int,
    env_seed: int,
    inference: Any,
    make_adder: Callable[[], Any],
    may_ask_ahead: Callable[[], bool],
) -> Collector | Turns:
    """The collector of worker `index`, called `name`, for which an inference server acts; or two in turns."""
    envs = setup.config.envs_per_actor

    def make(part: int, size: int, env_seed: int) -> Collector:
        offset = index * envs + part * (envs - size)
        port = ServerPort(inference, f"{name}.{part}", size, offset, setup.config.num_envs)
        return _make(setup, port, setup.make_environment(size, env_seed), offset, make_adder, {})

    if setup.config.inference == "server":
        return make(0, envs, env_seed)
    sizes = envs - envs // 2, envs // 2
    halves = [make(part, size, derive_seed(env_seed, f"half-{part}")) for part, size in enumerate(sizes)]
    return Turns(halves, may_ask_ahead)


def _make(
    setup: Setup, policy: core.Policy, environment: Any, offset: int, make_adder: Any, options: dict[str, Any]
) -> Collector:
    return Collector(
        environment if policy.takes_tensors else as_arrays(environment),
        policy,
        make_adder(),
        make_adder=make_adder,
        offset=offset,
        total=setup.config.num_envs,
        observers=make_observers(setup.config),
        # Actors with a limited policy lag pull parameters only at the start of an unroll.
        updates=setup.agent.max_policy_lag is None,
        **options,
    )
