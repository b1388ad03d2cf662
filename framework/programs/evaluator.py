"""The worker of the evaluator node, which plays whole episodes greedily with the newest parameters."""

from __future__ import annotations

from typing import Any

from framework import core
from framework.actors import PolicyActor
from framework.actors.environment_loop import EnvironmentLoop
from framework.programs.run_config import RunConfig
from framework.programs.seeding import prepare_process
from framework.programs.statistics import summarize
from framework.programs.worker import ProgramWorker
from framework.variables import VariableClient


class Evaluator(ProgramWorker):
    """Evaluates every `evaluate_period` env steps, and ends the program at its goal or its last step.

    One `step()` plays `num_evaluation_episodes` episodes, each in its own env, so that short episodes are not
    counted more often than long ones.

    Args:
      agent: makes the networks and the policy (with `evaluation=True`).
      make_environment: `(num_envs, seed) -> BatchedEnvironment`, for the evaluator's own environment.
      spec: the `EnvironmentSpec` of one env.
      config: the run's settings; `evaluate_period` is not None.
      learner: the variable source.
      counter: counts the env steps of the program.
      monitor: takes the rows of metrics and ends the program.
      checkpointer: keeps the parameters of the best evaluation and the step of the last one. None keeps
        nothing.
    """

    def __init__(
        self,
        agent: core.Agent,
        make_environment: Any,
        spec: Any,
        config: RunConfig,
        *,
        learner: Any,
        counter: Any,
        monitor: Any,
        checkpointer: Any = None,
        seed: int = 0,
    ):
        prepare_process(seed)
        num_episodes = config.num_evaluation_episodes
        self._counter, self._monitor, self._checkpointer = counter, monitor, checkpointer
        self._environment = make_environment(num_episodes, seed)
        networks = agent.make_networks(spec)
        # All variables, not only those that the policy names, because `best` holds the whole networks.
        self._variables = VariableClient(learner, networks) if learner is not None else None
        self._actor = PolicyActor(
            agent.make_policy(networks, evaluation=True),
            variable_client=self._variables,
            num_envs=num_episodes,
        )
        self._loop = EnvironmentLoop(self._environment, self._actor, should_update=False)
        self._num_episodes = num_episodes
        self._networks = networks
        self._best: float | None = None  # The highest mean return so far; None before it is read.
        assert config.evaluate_period is not None
        self._period, self._max_env_steps = config.evaluate_period, config.max_env_steps
        self._target_return = config.target_return
        state = None if checkpointer is None else checkpointer.get("evaluator")
        self._next = self._after(0 if state is None else state["env_steps"])

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
        played = self._loop.run_episodes(self._num_episodes)
        row = {
            "env_steps": counts.get("env_steps", 0),
            "learner_steps": counts.get("learner_steps", 0),
            "episodes": len(played["episode_length"]),
            **summarize([played]),
            "variables_version": self._variables.version if self._variables is not None else 0,
        }
        self._monitor.write("evaluator", row)
        self._keep_if_best(row)
        if self._checkpointer is not None:
            self._checkpointer.put("evaluator", {"env_steps": row["env_steps"]})
        self._next = self._after(row["env_steps"])
        reached = self._target_return is not None and row["episode_return"] >= self._target_return
        spent = self._max_env_steps is not None and row["env_steps"] >= self._max_env_steps
        if reached or spent:
            self._finished = True
            self._monitor.finish("target_return" if reached else "max_env_steps", row)
        return row

    def _after(self, env_steps: int) -> int:
        """The env step of the next evaluation."""
        due = (env_steps // self._period + 1) * self._period
        return due if self._max_env_steps is None else min(due, self._max_env_steps)

    def _keep_if_best(self, row: dict[str, Any]) -> None:
        """Saves the parameters of the best evaluation so far as part `best` of the run's checkpoints."""
        if self._checkpointer is None or self._variables is None:
            return
        if self._best is None:
            kept = self._checkpointer.get("best")
            self._best = float("-inf") if kept is None else float(kept["row"]["episode_return"])
        if row["episode_return"] >= self._best:
            self._best = row["episode_return"]
            networks = {name: value.cpu().clone() for name, value in self._networks.state_dict().items()}
            self._checkpointer.put("best", {"row": row, "networks": networks})

    def close(self) -> None:
        """Closes the environment."""
        self._environment.close()
