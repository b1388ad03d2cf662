"""The worker of an actor node, which steps one batched environment with one actor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from framework import core, specs
from framework.programs.acting import make_acting
from framework.programs.limiter_state import describe_room
from framework.programs.lockstep import Lockstep
from framework.programs.run_config import RunConfig
from framework.programs.seeding import prepare_process
from framework.programs.statistics import summarize
from framework.programs.worker import ProgramWorker
from framework.replay.errors import ServerClosed, ServerLost

# Batched steps that a worker requests from the counter at a time. The first grants are small, so that all
# actors take part in a short program. Later grants are a share of the steps made, because each request costs
# a message and a wait.
_FIRST_GRANT, _GRANT_SHARE, _LARGEST_GRANT = 16, 16, 64


class ActorWorker(ProgramWorker):
    """Acts for the B envs of one environment until the budget of env steps is spent.

    One `step()` is one step of all envs. The counter grants steps to all actors of a program in small
    portions, so that the program makes exactly `max_env_steps` steps.

    Args:
      agent: makes the networks, the policy and the adder.
      make_environment: `(num_envs, seed) -> BatchedEnvironment`.
      spec: the `EnvironmentSpec` of one env.
      config: the run's settings.
      replay: the replay client of the adder. None for an agent that stores nothing.
      learner: the variable source. None for an agent without parameters.
      counter: grants and counts steps.
      monitor: takes the rows of metrics.
      checkpointer: keeps the state of the policy's random numbers. None keeps nothing.
      index: index of this actor.
      seed: seed of this actor, from which its environments and its policy derive their seeds.
      inference: the inference server, for the modes that need one.
    """

    def __init__(
        self,
        agent: core.Agent,
        make_environment: Callable[[int, int], Any],
        spec: specs.EnvironmentSpec,
        config: RunConfig,
        *,
        replay: Any,
        learner: Any,
        counter: Any,
        monitor: Any,
        checkpointer: Any = None,
        index: int = 0,
        seed: int = 0,
        inference: Any = None,
    ):
        prepare_process(seed)
        self._name = f"actor-{index}"
        self._config, self._replay = config, replay
        self._counter, self._monitor, self._checkpointer = counter, monitor, checkpointer
        self._make_adder = functools.partial(agent.make_adder, replay, spec) if replay is not None else _none
        self._acting = make_acting(
            agent,
            make_environment,
            spec,
            config,
            learner=learner,
            inference=inference,
            name=self._name,
            seed=seed,
            make_adder=self._make_adder,
        )
        self._lockstep: Lockstep | None = None
        self._largest_grant = _LARGEST_GRANT
        if agent.max_policy_lag is not None and learner is not None:
            length = len(self._acting.halves) * agent.unroll_length
            self._lockstep = Lockstep(self._name, learner, counter, length, agent.max_policy_lag)
            # Never enough for a whole unroll, half of whose steps may be resets, which cost nothing.
            self._largest_grant = max(1, min(_LARGEST_GRANT, (agent.unroll_length - 2) // 2))
        self._started = False
        self._batched_steps = 0  # With two halves, two of them are a step of all envs.
        self._granted = self._spent = 0  # Env steps of the current grant, and how many of them are made.
        self._episodes = self._counted_episodes = 0  # Finished episodes.
        self._ended: list[dict[str, Any]] = []  # Episodes that ended since the last row.
        self._dropped = 0  # Items in flight when the program stopped.
        self._lost = 0  # Items in flight when a replay server was lost.
        self._replaced_at = -1  # This actor's steps at the last replacement of the adder.
        self._steps = self._logged_at = 0
        state = None if checkpointer is None else checkpointer.get(self._name)
        if state is not None:
            self._steps = self._logged_at = int(state["steps"])
            self._acting.restore(state["actor"])

    def ready(self) -> bool:
        if self._finished or not self._acting.ready():
            return False
        return self._lockstep is None or self._lockstep.may_step(self._batched_steps, self._version())

    def why_not_ready(self) -> str:
        """The text that the serial engine prints in a deadlock."""
        if not self._acting.ready():
            return (
                "its adder waits until replay accepts the items of a step of its "
                f"{self._config.envs_per_actor} envs: {describe_room(self._replay)}. Use fewer envs, or a "
                "rate limiter with a larger buffer."
            )
        assert self._lockstep is not None
        return f"waits for version {self._lockstep.needed_version(self._batched_steps)} of the parameters"

    def step(self) -> None:
        if not self._started:  # Not in the constructor: the learner may not have started yet.
            self._start()
        if self._lockstep is not None and not self._begin_unroll(self._lockstep):
            return  # The caller checks for a stop of the program, and calls again.
        # Ask before the grant is too small for a step of all envs, which would cut episodes short.
        if self._granted - self._spent < self._config.envs_per_actor:
            self._report(ask=True)
            if self._granted == 0:
                self._finish()
                return
        made, finished = self._acting.step(self._granted - self._spent)
        self._spent += made
        self._steps += made
        self._batched_steps += 1
        if finished is not None:
            self._ended.append(finished)
            self._episodes += len(finished["episode_length"])
        if self._steps - self._logged_at >= self._config.log_period:
            self._log()

    def recover(self, error: ServerClosed) -> bool:
        """Continues with new adders; False if the server did not restart, or was stopped."""
        if not isinstance(error, ServerLost) or self._steps == self._replaced_at:
            return False
        self._replaced_at = self._steps
        self._lost += self._acting.replace_adders(self._make_adder)
        return True

    def close(self) -> None:
        """Reports the last counts, saves the state for the last checkpoint, and closes the environment."""
        if not self._finished:
            self._finish()
        self._acting.close()

    def save(self) -> dict[str, Any]:
        """The state of the policy's random numbers."""
        return {"actor": self._acting.save(), "steps": self._steps}

    def _start(self) -> None:
        self._acting.update()
        self._started = True
        if self._lockstep is not None:
            self._lockstep.start(self._version())

    def _version(self) -> int:
        return -1 if self._acting.versioned is None else self._acting.versioned.version

    def _begin_unroll(self, lockstep: Lockstep) -> bool:
        """Pulls the newest parameters where an unroll begins; False if the required version is not there."""
        needed = lockstep.needed_version(self._batched_steps)
        if needed is None:
            return True
        if not lockstep.wait(needed, self._version(), lambda: self._acting.flush(timeout=0)):
            return False
        self._acting.update()
        return True

    def _report(self, ask: bool) -> None:
        """Reports the steps made of the last grant and, if `ask`, requests the next grant."""
        envs, wanted = self._config.envs_per_actor, 0
        if ask:
            wanted = min(max(_FIRST_GRANT, self._batched_steps // _GRANT_SHARE), self._largest_grant) * envs
        if ask and self._lockstep is not None:
            # At most the rest of the unroll: a larger grant could take steps that other actors need to
            # complete their unrolls at the end of the budget.
            left = self._lockstep.steps_left(self._batched_steps) * envs // len(self._acting.halves)
            wanted = min(wanted, max(1, left))
        episodes = self._episodes - self._counted_episodes
        counts = {"actor_episodes": episodes} if episodes else {}
        self._granted = self._counter.grant(self._name, wanted, spent=self._spent, **counts)
        self._spent = 0
        self._counted_episodes = self._episodes

    def _finish(self) -> None:
        self._finished = True
        # Items that a rate limiter refuses now stay out: no learner samples any more.
        self._dropped = self._acting.close_adders(timeout=0.2)
        if self._lockstep is not None:
            self._lockstep.wait_for_last(self._batched_steps)
        self._report(ask=False)
        self._log()
        ends_program = self._config.evaluate_period is None  # Otherwise the evaluator does.
        if ends_program and self._counter.remaining() == 0:
            self._monitor.finish("max_env_steps", self._counter.get_counts())

    def _log(self) -> None:
        # Save the state before the row, in case writing the row fails.
        if self._checkpointer is not None:
            self._checkpointer.put(self._name, self.save())
        if self._steps == self._logged_at:
            return
        self._logged_at = self._steps
        row: dict[str, Any] = {
            "steps": self._steps,
            "env_steps": self._counter.get_counts().get("env_steps", 0) + self._spent,
            "episodes": self._episodes,
            **summarize(self._ended),
        }
        if self._dropped:
            row["dropped_items"] = self._dropped
        if self._lost:
            row["lost_items"] = self._lost
        if self._acting.versioned is not None:
            row["variables_version"] = self._acting.versioned.version
        row.update({f"time/{name}_s": seconds for name, seconds in self._acting.take_seconds().items()})
        self._ended.clear()
        self._monitor.write(self._name, row)


def _none() -> None:
    """The adder of an agent that stores nothing."""
