"""The worker of an actor node: it steps one batched environment with one actor."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

import launch
from framework import core
from framework.programs.acting import make_acting
from framework.programs.limiter_state import describe_room
from framework.programs.run_config import RunConfig
from framework.programs.seeding import prepare_process
from framework.programs.statistics import EpisodeStatistics
from framework.programs.worker import ProgramWorker
from framework.replay.errors import DeadlineExceededError

_WAIT_S = 0.5  # for a version of the parameters, between two looks at whether the program is being stopped
_LAST_STEP_S = 60.0  # at the most for the learner's last step
_SAY_EVERY_S = 60.0  # that it still waits for it
_LOG = logging.getLogger(__name__)
_FIRST_GRANT, _GRANT_SHARE = 16, 16  # batched steps; what was made over the next grant
# The most batched steps asked of the counter at a time; fewer in the beginning, so that short programs are
# shared among their actors too.
_GRANT_STEPS = 64


class ActorWorker(ProgramWorker):
    """Acts for the B envs of one environment until the counter hands out no more steps.

    One ``step()`` is one step of all envs. The steps that all actors of a program may make are handed
    out by the counter in small grants, so that a program makes exactly ``max_env_steps`` of them.

    Args:
      agent: makes the networks, the policy and the adder.
      make_environment: ``(num_envs, seed) -> BatchedEnvironment``.
      spec: the ``EnvironmentSpec`` of one env.
      config: the run's settings.
      replay: the replay client that the adder writes to; None for an agent that stores nothing.
      learner: the variable source to pull parameters from; None for an agent without parameters.
      counter: hands out steps and counts them.
      monitor: takes the rows of metrics.
      checkpointer: keeps the state of the policy's random numbers between lives; None keeps nothing.
      index: which of the actors this is.
      seed: of this actor; environments and exploration derive theirs from it.
      inference: the inference server, for the modes that need one.
    """

    def __init__(
        self,
        agent: core.Agent,
        make_environment: Any,
        spec: Any,
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
        self._counter, self._monitor, self._checkpointer = counter, monitor, checkpointer
        self._learner, self._replay = learner, replay
        acting = make_acting(
            agent,
            make_environment,
            spec,
            config,
            replay=replay,
            learner=learner,
            inference=inference,
            name=self._name,
            seed=seed,
        )
        self._environment, self._adder, self._actor = acting.environment, acting.adder, acting.actor
        self._loop, self._parts, self._variables = acting.loop, acting.parts, acting.versioned
        self._stop_acting = acting.close
        self._envs, self._log_period = config.envs_per_actor, config.log_period
        self._ends_program = config.evaluate_period is None  # otherwise the evaluator does
        self._grant_steps = _GRANT_STEPS
        self._granted = self._spent = 0  # steps of the current grant, and how many of them are made
        self._episodes = EpisodeStatistics()
        self._steps = 0
        self._logged_at = 0
        self._dropped = 0  # items that were on their way when the program stopped
        self._started = False
        # For agents that follow the learner in step: unrolls count from the version there at the start.
        self._max_policy_lag = agent.max_policy_lag if learner is not None else None
        self._unroll_length = agent.unroll_length if self._max_policy_lag is not None else 0
        if self._max_policy_lag is not None:
            # Never enough for a whole unroll, half of whose steps may be resets, which cost nothing.
            self._grant_steps = max(1, min(_GRANT_STEPS, (self._unroll_length - 2) // 2))
        self._batched_steps = 0  # of the loop: with two halves, two of them are a step of all envs
        self._first_version = 0
        self._waiting_since: float | None = None  # for a version of the parameters
        self._said_at = 0.0
        if checkpointer is not None:
            self._restore()

    def ready(self) -> bool:
        if self._finished or not (self._adder is None or self._adder.ready()):
            return False
        return not self._started or self._has_version(timeout=0)

    def ready_if_stuck(self) -> bool:
        """True if the tables take at least a part of what a step of all envs may write."""
        if self._finished or self._adder is None or not self._adder.ready_if_stuck():
            return False
        return not self._started or self._has_version(timeout=0)

    def why_not_ready(self) -> str:
        """What the serial engine prints if nothing can go on."""
        if self._adder is not None and not self._adder.ready():
            return (
                f"its adder waits for room for what a step of its {self._envs} envs may write: "
                f"{describe_room(self._replay)}. Use fewer envs, or a rate limiter with a larger buffer."
            )
        return f"waits for version {self._needed_version()} of the parameters"

    def step(self) -> None:
        if not self._started:  # not in the constructor: the learner may not be up yet
            self._actor.update(wait=True)
            self._started = True
            self._first_version = self._variables.version if self._variables is not None else 0
        if not self._has_version(timeout=_WAIT_S):
            self._look_after_wait()
            return  # the caller looks whether the program is being stopped, and calls again
        self._waiting_since = None
        if self._needed_version() is not None:
            self._actor.update(wait=True)  # to the newest, which may be newer than what is needed
        # Before the grant is too small for a step of all envs: that would cut their episodes short.
        if self._granted - self._spent < self._envs:
            # More at a time the more it has made, up to a bound: each question is a message and a wait.
            batched = max(_FIRST_GRANT, min(self._grant_steps, self._batched_steps // _GRANT_SHARE))
            wanted = min(batched, self._grant_steps) * self._envs
            if self._max_policy_lag is not None:
                # No more than its unroll takes: what others need for theirs would be missing at the end.
                length = self._parts * self._unroll_length
                left = length - self._batched_steps % length
                wanted = min(wanted, max(1, left * self._envs // self._parts))
            self._granted = self._report(wanted)
            if self._granted == 0:
                self._finish()
                return
        before = self._loop.num_steps
        finished = self._loop.step(max_steps=self._granted - self._spent)
        made = self._loop.num_steps - before
        self._spent += made
        self._batched_steps += 1
        self._steps += made
        if finished:
            self._episodes.add(finished["episode_return"], finished["episode_length"])
        if self._steps - self._logged_at >= self._log_period:
            self._log()

    def _needed_version(self) -> int | None:
        """The version that the next batched step must be made with at least; None at other times."""
        if self._max_policy_lag is None:
            return None
        unroll, begun = divmod(self._batched_steps, self._parts * self._unroll_length)
        if begun:
            return None
        return self._first_version + max(0, unroll - self._max_policy_lag)

    def _has_version(self, timeout: float) -> bool:
        """Whether the parameters are new enough to go on; waits up to ``timeout`` seconds for them."""
        needed = self._needed_version()
        if needed is None or self._variables is None or self._variables.version >= needed:
            return True
        if self._learner.wait_for_version(needed, timeout, self._name if timeout > 0 else None):
            return True
        # At the end of the budget other actors may have stopped in the middle of their unroll, and the
        # version never comes. What this one was granted it makes all the same: too little for an unroll.
        return self._counter.ungranted() == 0

    def _look_after_wait(self) -> None:
        """The version waited for is made of what this actor has sent: raises what went wrong with that, and
        says now and then that the wait goes on."""
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = self._said_at = now
        held_back = "replay has everything that it has made"
        if self._adder is not None:
            try:
                self._adder.flush(timeout=0)
            except DeadlineExceededError as error:
                held_back = f"not all that it has made is in replay: {error}"
        if now - self._said_at >= _SAY_EVERY_S:
            self._said_at = now
            _LOG.warning(
                "%s has waited %.0f s for version %s of the parameters and has %s; %s",
                self._name,
                now - self._waiting_since,
                self._needed_version(),
                self._variables.version,
                held_back,
            )

    def close(self) -> None:
        """Counts what was done, leaves the state for the last checkpoint and closes the environment."""
        if not self._finished:
            self._finish()
        self._stop_acting()
        self._environment.close()

    def save(self) -> dict[str, Any]:
        """The state of the policy's random numbers, and the steps made."""
        return {"actor": self._actor.save(), "steps": self._steps}

    def _restore(self) -> None:
        state = self._checkpointer.get(self._name)
        if state is None:
            return
        self._steps = self._logged_at = int(state["steps"])
        self._actor.restore(state["actor"])

    def _finish(self) -> None:
        self._finished = True
        if self._adder is not None:
            # What a rate limiter does not let in now it never will: nobody samples any more.
            self._dropped = self._adder.close(timeout=0.2)
        self._wait_for_last_version()
        self._granted = self._report(0)
        self._log()
        if self._checkpointer is not None:
            self._checkpointer.put(self._name, self.save())
        if self._ends_program and self._counter.remaining() == 0:
            self._monitor.finish("max_env_steps", self._counter.get_counts())

    def _wait_for_last_version(self) -> None:
        """Until the learner has learned from the last complete unrolls, so that the program does not end, or
        evaluate, without that. Not if another actor's unroll is missing: then it has no batch."""
        context = launch.get_node_context()
        if self._max_policy_lag is None or not self._started or context.engine == "serial":
            return
        last = self._first_version + self._batched_steps // (self._parts * self._unroll_length)
        stopped = launch.stop_event()
        deadline = time.monotonic() + _LAST_STEP_S
        while not stopped.is_set() and time.monotonic() < deadline:
            if self._learner.wait_for_version(last, 2 * _WAIT_S) or not self._learner.is_learning():
                return

    def _report(self, wanted: int) -> int:
        """Counts the steps made of the last grant and asks for ``wanted`` more; returns those given."""
        episodes = self._episodes.take_new()
        counts = {"actor_episodes": episodes} if episodes else {}
        granted = self._counter.grant(self._name, wanted, spent=self._spent, **counts)
        self._spent = 0
        return granted

    def _log(self) -> None:
        if self._steps == self._logged_at:
            return
        self._logged_at = self._steps
        row: dict[str, Any] = {"steps": self._steps, **self._episodes.summary()}
        if self._dropped:
            row["dropped_items"] = self._dropped
        if self._variables is not None:
            row["variables_version"] = self._variables.version
        row.update({f"time/{k}_s": v for k, v in self._loop.take_seconds().items()})
        # Before the row: if that cannot be written, the state is safe.
        if self._checkpointer is not None:
            self._checkpointer.put(self._name, self.save())
        self._monitor.write(self._name, {k: _plain(v) for k, v in row.items()})


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
