"""Loads the policy of a run from its folder."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import torch

from framework import specs
from framework.checkpoints import CheckpointError, CheckpointReader
from framework.config_checks import RaisedAs
from framework.own_settings import in_own_settings, seeded
from framework.parameters import load_state, state_of
from framework.programs.greedy import GreedyPolicy
from framework.programs.make import environment_spec, make_environment
from framework.runs import recorded_specs
from framework.runs.run_folder import RunError, RunFolder


class LoadedPolicy(GreedyPolicy):
    """The greedy policy of a run, from a checkpoint.

    ```python
    policy = load_policy("runs/cartpole")
    environment = policy.make_environment(num_envs=1, seed=0)
    timestep = environment.reset()
    action = policy(timestep.observation, timestep.first())               # [B, ...] to [B, ...]
    ```

    Attributes:
      agent: the agent, as configured in the run, but on the CPU.
      folder: the run's folder.
      step: env steps of the run when the checkpoint was saved, or at its best evaluation.
      checkpoint: folder of the checkpoint.
      is_best: whether the parameters belong to the best evaluation.
    """

    @in_own_settings
    def __init__(
        self, folder: RunFolder, reader: CheckpointReader, best: bool = False, allow: Collection[str] = ()
    ):
        self.folder = folder
        agent = folder.with_device("cpu").make_agent(allow)  # This machine need not have the run's GPU.
        spec, config = recorded_specs.restored(folder.environment_spec), folder.config
        if spec is None:  # The folder does not say enough, so the environment has to.
            factory = folder.environment_factory()
            with RaisedAs(RunError, (ValueError, TypeError, ImportError), f"{folder.path}: "):
                spec = environment_spec(agent, factory, config)
            RunFolder.describe(agent, factory, config, spec).check_same()
        self.agent, self.spec, self.config = agent, spec, config
        self.step, self.checkpoint, self.is_best = reader.step, reader.path, best
        with seeded(0):
            networks = self.networks = agent.make_networks(spec)
            self._load(reader, best)
        super().__init__(agent, spec, config, networks, self._made, self.step)

    def _made(self, num_envs: int, seed: int, render_mode: str | None, evaluation: bool) -> Any:
        """The run's environment. RunError: it cannot be made here, or its specs are not the run's."""
        factory = self.folder.environment_factory()
        with RaisedAs(RunError, (ValueError, TypeError, ImportError), f"{self.folder.path}: "):
            environment = make_environment(
                self.agent, factory, self.config, num_envs, seed, render_mode, evaluation
            )
        try:
            self.folder.check_spec(specs.make_environment_spec(environment))
        except RunError:
            environment.close()
            raise
        return environment

    def _load(self, reader: CheckpointReader, best: bool) -> None:
        if best and "best" not in reader.names:
            raise RunError(
                f"{reader.path}: got no best parameters, because it was saved before the first evaluation. "
                "Ask for 'latest', the newest parameters (--checkpoint latest)."
            )
        if best:
            # It has the variables that the policy names; the others keep their initial values.
            load_state(self.networks, reader.state("best", "networks"))
            self.step = _step_of(reader.state("best", "row"))
        elif "learner" in reader.names:
            learner = self.agent.make_learner(self.networks, self.spec)
            learner.restore(reader.state("learner", "learner"))
            load_state(self.networks, state_of(learner.parameters()))
        elif isinstance(self.networks, torch.nn.Module | Mapping) and state_of(self.networks):
            raise RunError(
                f"{reader.path}: got no parameters of a learner called 'learner', but the parts "
                f"{', '.join(reader.names)}. If the run ended before its learner saved any, resume it, or "
                "start a new one. If its learners have other names, give the one that acts this name in the "
                "agent's build."
            )


def load_policy(
    run: str | os.PathLike[str],
    checkpoint: str | int | os.PathLike[str] | None = None,
    allow: Collection[str] = (),
) -> LoadedPolicy:
    """Loads the policy of the run in the folder `run`: `action = policy(observation)`.

    Args:
      run: the folder of the run.
      checkpoint: "best" for the parameters of the best evaluation, which the newest checkpoint has; "latest"
        or None for the newest checkpoint's own; "previous"; a step, which a checkpoint has in its name, or of
        the best evaluation; or a folder.
      allow: modules whose objects the run may name as its agent, environment or parts, such as
        `("my_lab",)`. Registered names need none.

    Raises:
      RunError: The run or its checkpoint cannot be read, or it names code of another module.
    """
    folder = RunFolder.open(run)
    folder.check_names(allow)
    best = checkpoint == "best" or _is_step_of_best(folder, str(checkpoint))
    reader = folder.restore(None if best else checkpoint)
    with RaisedAs(RunError, CheckpointError):
        return LoadedPolicy(folder, reader, best, allow)


def evaluated_or_latest(run: str | os.PathLike[str]) -> str:
    """`best`, or `latest` if nothing was evaluated before the newest checkpoint of a run."""
    newest = RunFolder.open(run).checkpointer.latest()
    return "best" if newest is not None and (newest / "best").exists() else "latest"


def _is_step_of_best(folder: RunFolder, text: str) -> bool:
    """Whether `text` is the step of the best evaluation, and of no checkpoint."""
    if not text.isdigit() or evaluated_or_latest(folder.path) == "latest":
        return False
    names = [path.name for path in folder.checkpointer.checkpoints()]
    if any(name.endswith(f"-step-{int(text)}") for name in names):
        return False
    return _step_of(folder.restore().state("best", "row")) == int(text)


def _step_of(row: Mapping[str, Any]) -> int:
    return int(row.get("env_steps", row["learner_steps"]))
