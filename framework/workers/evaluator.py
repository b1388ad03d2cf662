"""The worker of the evaluator node, which plays whole episodes greedily with the newest parameters."""

from __future__ import annotations

from typing import Any

import launch
from framework.actors import EnvironmentLoop, PolicyActor
from framework.actors.environment_loop import summarize
from framework.own_settings import seeded
from framework.runs.parts import make_observers
from framework.types import Nest
from framework.variables import VariableClient
from framework.workers.worker import ProgramWorker, Setup, prepare_process


class _StoppableActor(PolicyActor):
    """Ends an evaluation when the program stops: whole episodes may take longer than a node has to end."""

    def select_action(self, observation: Nest) -> Nest:
        if launch.stop_event().is_set():
            raise launch.ProgramStopped("The program stops during an evaluation.")
        return super().select_action(observation)


class Evaluator(ProgramWorker):
    """Evaluates every `evaluate_period` steps of the clock, and ends the program at its goal or its end.

    One `step()` plays `num_evaluation_episodes` episodes. Each env plays a fixed share of them, so that short
    episodes are not counted more often than long ones.

    Args:
      setup: makes the environment, the networks and the policy. Its `config.evaluate_period` is a number.
      learner: the variable source.
      counter: counts the steps of the program.
      monitor: takes the rows of metrics and ends the program.
      checkpointer: keeps the policy's parameters of the best evaluation, as part `best` (`NAME-best` of an
        evaluator with another name), and the step of the last one. None keeps nothing.
      name: label of its rows.
      steps_name: name of the count of the learner's steps.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        learner: Any,
        counter: Any,
        monitor: Any,
        checkpointer: Any = None,
        name: str = "evaluator",
        steps_name: str = "learner_steps",
        seed: int = 0,
    ):
        prepare_process(seed)
        self._setup, self._name, self._steps_name = setup, name, steps_name
        self._counter, self._monitor, self._checkpointer = counter, monitor, checkpointer
        best = None if checkpointer is None else checkpointer.get(_best_part(name))
        self._best = () if best is None else setup.agent.score(best["row"])
        state = None if checkpointer is None else checkpointer.get(name)
        self._clock = setup.clock
        self._evaluated_at = 0 if state is None else state["evaluated_at"]
        num_envs = setup.config.num_evaluation_envs
        environment = setup.make_environment(num_envs, 0)  # The same episodes in every run.
        with seeded(seed):
            networks = setup.agent.make_networks(setup.spec)
        policy = setup.agent.make_policy(networks, evaluation=True)
        self._variables = VariableClient(learner, networks, policy) if learner is not None else None
        self._actor = _StoppableActor(policy, variable_client=self._variables, num_envs=num_envs)
        self._loop = EnvironmentLoop(
            environment,
            self._actor,
            observers=make_observers(setup.config),
            should_update=False,
            max_episode_steps=setup.config.evaluation_limit,
        )

    def ready(self) -> bool:
        return self._clock.now(self._counter.get_counts()) >= self._next

    def why_not_ready(self) -> str:
        """The text that the serial engine prints in a deadlock."""
        return f"waits for {self._next} {self._clock.count}"

    def step(self) -> None:
        # A bounded wait, to notice a stop. The counter ends it when the step is reached.
        if not self._counter.wait_for(self._clock.count, self._next, timeout=0.5):
            return
        self.evaluate()

    def evaluate(self) -> dict[str, Any]:
        """Plays the episodes now, writes a row, and ends the program at its goal or its last step."""
        counts = self._counter.get_counts()
        self._actor.update(wait=True)
        cut_before = self._loop.num_cut
        config, policy = self._setup.config, self._actor.policy
        played = self._setup.agent.play(self._loop, policy, config.num_evaluation_episodes)
        now = self._evaluated_at = self._clock.now(counts)
        row = {
            **({"env_steps": now} if self._clock.acts else {}),
            "learner_steps": counts.get(self._steps_name, 0),
            "episodes": len(played["episode_length"]),
            **summarize([played]),
            "variables_version": self._variables.version if self._variables is not None else 0,
        }
        if cut := self._loop.num_cut - cut_before:
            row["cut_episodes"] = cut
        self._monitor.write(self._name, row, evaluation=True)
        if self._checkpointer is not None:
            if self._variables is not None and (score := self._setup.agent.score(row)) >= self._best:
                self._best = score
                self._checkpointer.put(
                    _best_part(self._name), {"row": row, "networks": self._variables.copy()}
                )
            self._checkpointer.put(self._name, {"evaluated_at": now})
        target, limit = config.target_return, self._clock.limit(config)
        reached = target is not None and row["episode_return"] >= target
        if reached or (limit is not None and now >= limit):
            self._finished = True
            if reached:
                self._monitor.finish("target_return", row)
            else:
                self._monitor.finish_evaluation(self._name, row, self._setup.evaluators, self._clock.budget)
        return row

    @property
    def _next(self) -> int:
        """The step of the next evaluation. Not stored: a resumed run may have another limit."""
        period, limit = self._setup.config.evaluate_period, self._clock.limit(self._setup.config)
        assert isinstance(period, int)
        due = (self._evaluated_at // period + 1) * period
        return due if limit is None else min(due, limit)

    def close(self) -> None:
        """Closes the environment."""
        self._loop.environment.close()


def _best_part(name: str) -> str:
    """The part of a checkpoint with the parameters of an evaluator's best evaluation."""
    return "best" if name == "evaluator" else f"{name}-best"
