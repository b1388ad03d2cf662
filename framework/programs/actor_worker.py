"""The worker of an actor node: all envs as one batch, or two halves that alternate.

```text
half 0     |env|adder|  ....  |env|adder|  ....  |env|adder|        ....  waits for its turn
half 1        ....  |env|adder|  ....  |env|adder|
inference  |--1--|  |--0--|   |--1--|  |--0--|                      always of the half that does not step
```

Each half has its own environment, adder and loop, like a smaller actor, and asks the inference server for its
actions. Alternating is faster where inference can overlap stepping: with slow environments or large networks.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from framework import core
from framework.actors import EnvironmentLoop, PolicyActor
from framework.actors.inference_client import InferenceActor, ServerPort, connect
from framework.environments.base import BatchedEnvironment
from framework.programs.last_samples import LastSamples
from framework.programs.limiter_state import describe_tables
from framework.programs.parts import make_observers
from framework.programs.policy_lag import Lockstep
from framework.programs.row_sender import RowSender
from framework.programs.worker import (
    ProgramWorker,
    Setup,
    derive_seed,
    is_elastic,
    prepare_process,
    seeded,
    summarize,
)
from framework.replay.errors import ServerClosed, ServerLost
from framework.variables import VariableClient
from launch.context import find_context

_SILENT_S = 60.0  # For an answer of the source of parameters, which may be lost with its host for good.
_WAIT_S = 0.5  # For steps that other actors do not take, between two checks for a stop of the program.
# Steps of all its envs that a worker holds a grant for. The first grants are small, so that all actors take
# part in a short program. Later grants are a share of the steps made, because each request costs a message.
# Where the counter answers at once, grants are half as large, and are used up before the next request.
_FIRST_GRANT, _GRANT_SHARE, _LARGEST_GRANT = 16, 16, 128


class Half(NamedTuple):
    """All envs of an actor or half of them, with the actor and the loop that step them.

    Attributes:
      environment: the batched environment of these envs.
      actor: chooses their actions and owns the adder.
      loop: drives the environment with the actor.
    """

    environment: BatchedEnvironment
    actor: PolicyActor | InferenceActor
    loop: EnvironmentLoop


class ActorWorker(ProgramWorker):
    """Acts for the B envs of one actor until the budget of env steps is spent.

    One `step()` is one step of all envs, or of the half whose turn it is. The counter grants steps to all
    actors of a program in small portions, so that the program makes exactly `max_env_steps` steps.

    Args:
      setup: makes the environment, the networks, the policy and the adder.
      replay: the replay client of the adder. None for an agent that stores nothing.
      learner: the variable source. None for an agent without parameters.
      counter: a client of the `Counter`, which grants and counts steps.
      monitor: takes the rows of metrics.
      checkpointer: keeps the state of the policy's random numbers. None keeps nothing.
      name: name of the group of actors. This actor is `NAME-INDEX`.
      index: index of this actor.
      seed: seed of this actor, from which its environments and its policy derive their seeds; those of
        environments of a restored actor also from the steps that it has made.
      inference: the inference server, for the modes that need one.
      steps_name: name of the count of the learner's steps.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        replay: Any,
        learner: Any,
        counter: Any,
        monitor: Any,
        checkpointer: Any = None,
        name: str = "actor",
        index: int = 0,
        seed: int = 0,
        inference: Any = None,
        steps_name: str = "learner_steps",
    ):
        prepare_process(seed)
        self._name = f"{name}-{index}"
        self._ends_program = not setup.evaluators  # Otherwise the evaluators do.
        agent, self._config, self._replay = setup.agent, setup.config, replay
        self._counter, self._monitor = counter, monitor
        self._rows = RowSender(self._name, steps_name, counter, monitor, checkpointer)
        self._make_adder = lambda: None if replay is None else agent.make_adder(replay, setup.spec)
        self._versioned: VariableClient | ServerPort | None = (
            None  # Has the version of the acting parameters.
        )
        # Makes the random choices; None if another node acts.
        self._acting: PolicyActor | None
        state = None if checkpointer is None else checkpointer.get(self._name)
        self._steps = self._logged_at = 0 if state is None else int(state["steps"])
        # With its first seed, an actor that continues would repeat the episodes of the beginning.
        env_seed = derive_seed(seed, f"after-{self._steps}") if self._steps else seed
        first_env = index * self._config.envs_per_actor
        self._halves = self._make_halves(setup, learner, inference, seed, env_seed, first_env)
        self._half = self._halves[0]  # Whose turn it is.
        self._lockstep: Lockstep | None = None
        self._counts_episodes = agent.episodes_per_batch is not None
        self._elastic = is_elastic(self._config)
        self._life = uuid.uuid4().hex if self._elastic else ""
        node = find_context()
        self._asks_ahead = node is not None and node.engine != "serial"
        self._largest_grant = _LARGEST_GRANT if self._asks_ahead else _LARGEST_GRANT // 2
        if agent.max_policy_lag is not None and learner is not None:
            units, parts = len(self._halves) * agent.unroll_length, 1
            if agent.episodes_per_batch is not None:
                units, parts = agent.episodes_per_batch, self._config.num_actors
            lag, elastic = agent.max_policy_lag, self._elastic
            # An elastic actor that fails is restarted, beside another source.
            source = learner.with_timeout(_SILENT_S) if elastic else learner
            self._lockstep = Lockstep(self._name, source, counter, units, lag, parts, elastic, self._life)
            # Never enough for a whole unroll, half of whose steps may be resets, which cost nothing.
            self._largest_grant = max(1, min(self._largest_grant, (agent.unroll_length - 2) // 2))
        # Off-policy, or from a queue; with a limited policy lag, the lockstep waits for the last batch.
        self._last_samples: LastSamples | None = None
        if replay is not None and learner is not None and self._lockstep is None:
            self._last_samples = LastSamples(self._name, replay, counter, steps_name)
        # Elastic actors wait for one another's steps to count.
        self._holds = self._last_samples is not None and not self._elastic
        self._reported = (0, 0)  # Env steps and episodes of the last report.
        self._started = False
        self._batched_steps = 0  # With two halves, two of them are a step of all envs.
        self._granted = self._spent = 0  # Env steps of the current grant, and how many of them are made.
        self._request: Future | None = None  # For a larger grant, which includes the rest of this one.
        self._episodes = self._counted_episodes = 0  # Finished episodes.
        self._ended: list[dict[str, Any]] = []  # Episodes that ended since the last row.
        self._dropped = 0  # Items in flight when the program stopped.
        self._lost = 0  # Items in flight when a replay server was lost.
        self._replaced_at = -1  # This actor's steps at the last replacement of the adder.
        # Before the program was resumed, or this actor restarted.
        self._earlier = {"episodes": 0, "lost_items": 0, "dropped_episodes": 0}
        if state is not None:
            self._earlier = {name: int(state.get(name, 0)) for name in self._earlier}
            if self._acting is not None and state["actor"] is not None:
                self._acting.restore(state["actor"])

    def _make_halves(
        self, setup: Setup, learner: Any, inference: Any, seed: int, env_seed: int, first_env: int
    ) -> list[Half]:
        """Makes one half with all envs, or two, with the source of actions that `config.inference` names.

        `env_seed` seeds the environments, `seed` all else. `first_env` is the index of this actor's first env
        in the program.
        """
        agent, spec, config = setup.agent, setup.spec, setup.config
        envs = config.envs_per_actor
        alternates = config.inference == "alternating+server"
        sizes = [envs - envs // 2, envs // 2] if alternates else [envs]
        ports: list[ServerPort] = []
        variables, self._acting = None, None
        if inference is None:
            with seeded(seed):
                networks = agent.make_networks(spec)
                policy = self._make_policy(setup, networks)
            if learner is not None:
                variables = VariableClient(learner, networks, policy, config.update_period)
        halves: list[Half] = []
        for index, size in enumerate(sizes):
            environment = setup.make_environment(
                size, derive_seed(env_seed, f"half-{index}") if alternates else env_seed
            )
            offset = first_env + sum(sizes[:index])
            actor: PolicyActor | InferenceActor
            if inference is not None:
                port = connect(inference, f"{self._name}.{index}", size, offset, config.num_envs)
                ports.append(port)
                actor = InferenceActor(port, self._make_adder(), size)
            else:
                actor = PolicyActor(
                    policy, self._make_adder(), variables, envs, seed, offset, config.num_envs
                )
                self._acting = actor
            # Actors with a limited policy lag pull parameters only at the start of an unroll.
            loop = EnvironmentLoop(
                environment,
                actor,
                observers=make_observers(config),
                should_update=agent.max_policy_lag is None,
            )
            halves.append(Half(environment, actor, loop))
        if learner is not None:
            self._versioned = ports[0] if ports else variables
        return halves

    def ready(self) -> bool:
        adder = self._half.actor.adder
        if self._finished or not (adder is None or adder.ready()):
            return False
        return self._lockstep is None or self._lockstep.may_step(self._done(), self._version())

    def why_not_ready(self) -> str:
        """The text that the serial engine prints in a deadlock."""
        adder = self._half.actor.adder
        if adder is not None and not adder.ready():
            return (
                "its adder waits until replay accepts the items of a step of its "
                f"{self._config.envs_per_actor} envs: {describe_tables(self._replay)}. Use fewer envs, or a "
                "rate limiter with a larger buffer."
            )
        assert self._lockstep is not None
        return f"waits for version {self._lockstep.needed_version(self._done())} of the parameters"

    def step(self) -> None:
        if not self._started:  # Not in the constructor: the learner may not have started yet.
            self._started = True
            self._update()
            if self._lockstep is not None:
                self._lockstep.start(self._version())
        if self._lockstep is not None and not self._begin_unroll(self._lockstep):
            return  # The caller checks for a stop of the program, and calls again.
        if not self._has_steps():
            # The steps of an actor that is lost go to the others.
            if self._elastic and self._counter.wait_for_steps(_WAIT_S):
                return
            adders = [half.actor.adder for half in self._halves if half.actor.adder is not None]
            if self._last_samples is None or self._last_samples.are_drawn(adders):
                self._finish()
            return
        half, steps = self._half, self._batched_steps + 1
        following = self._halves[steps % len(self._halves)]
        if half is not following and isinstance(half.actor, InferenceActor):
            half.actor.request()  # Does nothing if the request was made ahead.
            # Not ahead of a step that begins an unroll, which may need newer parameters.
            lockstep = self._lockstep
            if lockstep is None or (not self._counts_episodes and lockstep.needed_version(steps) is None):
                assert isinstance(following.actor, InferenceActor)
                following.actor.request()  # Computed while this half steps.
        self._step_envs()
        self._half, self._batched_steps = following, steps

    def recover(self, error: ServerClosed) -> bool:
        """Continues with new adders and episodes; False if the server did not restart, or was stopped."""
        if not isinstance(error, ServerLost) or self._steps == self._replaced_at:
            return False
        self._replaced_at = self._steps
        self._lost += self._close_adders(timeout=0.0)
        for half in self._halves:
            half.actor.adder = self._make_adder()
            half.loop.restart()
        return True

    def close(self) -> None:
        """Reports the last counts, saves the state for the last checkpoint, and closes the environments."""
        if not self._finished:
            self._finish()
        for half in self._halves:
            if isinstance(half.actor, InferenceActor):
                half.actor.close()
        for half in self._halves:
            half.environment.close()

    def save(self) -> dict[str, Any]:
        """The state of the policy's random numbers, None for those of another node; and counts of the run."""
        acting = None if self._acting is None else self._acting.save()
        return {"actor": acting, "steps": self._steps, **self._totals()}

    def _totals(self) -> dict[str, int]:
        """Counts since the beginning of the run."""
        dropped = sum(half.loop.num_dropped for half in self._halves)
        counts = {"episodes": self._episodes, "lost_items": self._lost, "dropped_episodes": dropped}
        return {name: self._earlier[name] + count for name, count in counts.items()}

    def _make_policy(self, setup: Setup, networks: Any) -> core.Policy:
        return setup.agent.make_policy(networks)

    def _step_envs(self) -> None:
        """One step of the envs whose turn it is, at most the rest of the grant."""
        loop = self._half.loop
        before = loop.num_steps
        finished = loop.step(self._granted - self._spent)
        made = loop.num_steps - before
        self._spent += made
        self._steps += made
        if finished is not None:
            self._ended.append(finished)
            self._episodes += len(finished["episode_length"])
        if self._steps - self._logged_at >= self._config.log_period:
            self._log()
        else:
            self._rows.poll()

    def _done(self) -> int:
        """What the lockstep counts: steps of the loop, or episodes."""
        return self._episodes if self._counts_episodes else self._batched_steps

    def _version(self) -> int:
        return -1 if self._versioned is None else self._versioned.version

    def _update(self) -> None:
        for half in self._halves:
            half.actor.update(wait=True)

    def _close_adders(self, timeout: float) -> int:
        """Closes the adders; returns how many items were dropped."""
        adders = [half.actor.adder for half in self._halves if half.actor.adder is not None]
        return sum(adder.close(timeout=timeout) for adder in adders)

    def _begin_unroll(self, lockstep: Lockstep) -> bool:
        """Pulls the newest parameters where an unroll begins; False if the required version is not there."""
        done = self._done()
        needed = lockstep.needed_version(done)
        if needed is None:
            return True
        if not lockstep.wait(done, needed, self._version(), [half.actor.adder for half in self._halves]):
            return False
        self._update()
        lockstep.begin(done, self._version())
        return True

    def _has_steps(self) -> bool:
        """Whether steps are granted. Requests more when half are spent, so that the counter is in time."""
        if self._request is not None and (self._has_few() or self._request.done()):
            self._take_grant()
        is_due = self._asks_ahead and 2 * self._spent >= self._granted
        if self._request is None and (is_due or self._has_few()):
            self._request = self._report(self._counter.futures.grant, self._wanted())
        if self._has_few():
            self._take_grant()
        return self._granted > self._spent

    def _has_few(self) -> bool:
        """Whether the grant is too small for a step of all envs, which would cut episodes short."""
        return self._granted - self._spent < self._config.envs_per_actor

    def _take_grant(self) -> None:
        if self._request is not None:
            self._granted, self._request = self._request.result(), None
            if self._holds and not self._granted:  # They were not counted; see `Counter.grant`.
                self._spent += self._reported[0]
                self._counted_episodes -= self._reported[1]

    def _wanted(self) -> int:
        """The number of env steps to request, with the rest of the current grant."""
        envs = self._config.envs_per_actor
        wanted = min(max(_FIRST_GRANT, self._batched_steps // _GRANT_SHARE), self._largest_grant) * envs
        if self._lockstep is None or self._counts_episodes:
            return wanted
        # At most the rest of the unroll: a larger grant could take steps that other actors need to complete
        # their unrolls at the end of the budget.
        left = self._lockstep.units_left(self._batched_steps) * envs // len(self._halves)
        return min(wanted, max(1, left))

    def _report(self, grant: Callable[..., Any], wanted: int) -> Any:
        """Reports steps and episodes together, because the last report may end the program; see `grant`."""
        episodes = self._episodes - self._counted_episodes
        options: dict[str, Any] = {"life": self._life} if self._elastic else {}
        if self._holds and wanted:
            options["holds"] = True
        answer = grant(self._name, wanted, self._spent, actor_episodes=episodes, **options)
        self._reported = self._spent, episodes
        # Until the answer is there, the rest may be spent.
        self._granted = min(max(0, self._granted - self._spent), wanted)
        self._spent, self._counted_episodes = 0, self._episodes
        return answer

    def _finish(self) -> None:
        self._finished = True
        # Items that a rate limiter refuses now stay out: no learner samples any more.
        self._dropped += self._close_adders(timeout=0.2)
        if self._lockstep is not None:
            self._lockstep.wait_for_last(self._done())
        self._take_grant()  # Requests in flight may overtake each other.
        self._report(self._counter.grant, 0)
        self._log()
        self._rows.wait()
        if self._ends_program and self._counter.remaining() == 0:
            self._monitor.finish("max_env_steps", self._counter.get_counts())

    def _log(self) -> None:
        # The state before the row, in case writing the row fails.
        self._rows.keep(self.save())
        if self._steps == self._logged_at:
            return
        totals = self._totals()
        row: dict[str, Any] = {
            "steps": self._steps,
            "env_steps": self._spent,
            "episodes": totals["episodes"],
            **summarize(self._ended),
        }
        if self._dropped:
            row["dropped_items"] = self._dropped
        row |= {name: totals[name] for name in ("lost_items", "dropped_episodes") if totals[name]}
        if self._versioned is not None:
            row["variables_version"] = self._versioned.version
        # With two halves, select_action is time spent waiting.
        for half in self._halves:
            for name, seconds in half.loop.seconds.items():
                row[f"time/{name}_s"] = row.get(f"time/{name}_s", 0.0) + seconds
                half.loop.seconds[name] = 0.0
        self._ended.clear()
        self._rows.send(row, self._episodes - self._counted_episodes)
        self._logged_at, self._counted_episodes = self._steps, self._episodes
