"""The worker of the evaluator node, which plays whole episodes greedily with the newest parameters."""

from __future__ import annotations

from typing import Any

import dm_env
import numpy as np
import torch

import launch
from framework.actors import EnvironmentLoop, EnvironmentLoopObserver, PolicyActor
from framework.actors.results import summarize
from framework.environments import BatchedEnvironment
from framework.runs.parts import make_observers
from framework.types import Nest
from framework.variables import VariableClient
from framework.workers.worker import ProgramWorker, Setup, prepare_process, seeded


class _Stop(EnvironmentLoopObserver):
    """Ends an evaluation when the program stops: whole episodes may take longer than a node has to end."""

    def observe_first(self, environment: BatchedEnvironment, timestep: dm_env.TimeStep) -> None:
        pass

    def observe(self, environment: BatchedEnvironment, timestep: dm_env.TimeStep, action: Nest) -> None:
        if launch.stop_event().is_set():
            raise launch.ProgramStopped("The program stops during an evaluation.")

    def get_metrics(self, envs: np.ndarray) -> dict[str, np.ndarray]:
        return {}


class Evaluator(ProgramWorker):
    """Evaluates every `evaluate_period` env steps, and ends the program at its goal or its last step.

    One `step()` plays `num_evaluation_episodes` episodes, each in its own env, so that short episodes are not
    counted more often than long ones.

    Args:
      setup: makes the environment, the networks and the policy. Its `config.evaluate_period` is not None.
      learner: the variable source.
      counter: counts the env steps of the program.
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
        self._agent, self._config, self._evaluators = setup.agent, setup.config, setup.evaluators
        self._name, self._steps_name = name, steps_name
        self._best_part = "best" if name == "evaluator" else f"{name}-best"
        self._counter, self._monitor, self._checkpointer = counter, monitor, checkpointer
        num_episodes = setup.config.num_evaluation_episodes
        self._environment = setup.make_environment(num_episodes, 0)  # The same episodes in every run.
        with seeded(seed):
            self._networks = networks = setup.agent.make_networks(setup.spec)
        policy = setup.agent.make_policy(networks, evaluation=True)
        self._variables = VariableClient(learner, networks, policy) if learner is not None else None
        self._actor = PolicyActor(policy, variable_client=self._variables, num_envs=num_episodes)
        observers = [*make_observers(setup.config), _Stop()]
        self._loop = EnvironmentLoop(
            self._environment,
            self._actor,
            observers=observers,
            should_update=False,
            max_episode_steps=setup.config.evaluation_limit,
        )
        self._best = float("-inf")  # The highest mean return so far.
        self._evaluated = 0  # Env step of the last evaluation.
        if checkpointer is not None:
            best, last = checkpointer.get(self._best_part), checkpointer.get(name)
            self._best = self._best if best is None else float(best["row"]["episode_return"])
            self._evaluated = 0 if last is None else last["env_steps"]

    def ready(self) -> bool:
        return not self._finished and self._counter.get_counts().get("env_steps", 0) >= self._next

    def why_not_ready(self) -> str:
        """The text that the serial engine prints in a deadlock."""
        return f"waits for env step {self._next}"

    def step(self) -> None:
        # A bounded wait, to notice a stop. The counter ends it when the step is reached.
        if not self._counter.wait_for("env_steps", self._next, timeout=0.5):
            return
        self.evaluate()

    def evaluate(self) -> dict[str, Any]:
        """Plays the episodes now, writes a row, and ends the program at its goal or its last step."""
        counts = self._counter.get_counts()
        self._actor.update(wait=True)
        cut_before = self._loop.num_cut
        played = self._agent.play(self._loop, self._actor.policy, self._config.num_evaluation_episodes)
        row = {
            "env_steps": counts.get("env_steps", 0),
            "learner_steps": counts.get(self._steps_name, 0),
            "episodes": len(played["episode_length"]),
            **summarize([played]),
            "variables_version": self._variables.version if self._variables is not None else 0,
        }
        if cut := self._loop.num_cut - cut_before:
            row["cut_episodes"] = cut
        self._monitor.write(self._name, row, evaluation=True)
        if self._checkpointer is not None:
            if self._variables is not None and row["episode_return"] >= self._best:
                self._best = row["episode_return"]
                self._checkpointer.put(self._best_part, {"row": row, "networks": self._acting_parameters()})
            self._checkpointer.put(self._name, {"env_steps": row["env_steps"]})
        self._evaluated = row["env_steps"]
        target, limit = self._config.target_return, self._config.max_env_steps
        reached = target is not None and row["episode_return"] >= target
        if reached or (limit is not None and row["env_steps"] >= limit):
            self._finished = True
            if reached:
                self._monitor.finish("target_return", row)
            else:
                self._monitor.finish_evaluation(self._name, row, self._evaluators)
        return row

    def _acting_parameters(self) -> dict[str, torch.Tensor]:
        """A copy of the parameters that the policy acts with, as entries of the networks' state dict."""
        names = self._actor.policy.variables
        return {
            key: value.cpu().clone()
            for key, value in self._networks.state_dict().items()
            if not names or key.partition(".")[0] in names
        }

    @property
    def _next(self) -> int:
        """The env step of the next evaluation. Not stored: a resumed run may have another limit."""
        period, limit = self._config.evaluate_period, self._config.max_env_steps
        assert period is not None
        due = (self._evaluated // period + 1) * period
        return due if limit is None else min(due, limit)

    def close(self) -> None:
        """Closes the environment."""
        self._environment.close()
