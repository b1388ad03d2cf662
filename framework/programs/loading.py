"""Loads the policy of a run from its folder."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
import tree

from framework import specs
from framework.actors import PolicyActor
from framework.checkpoints import CheckpointError, CheckpointReader
from framework.config_checks import RaisedAs
from framework.programs.make import environment_spec, make_environment
from framework.runs.run_folder import RunError, RunFolder


class LoadedPolicy:
    """The greedy policy of a run.

    ```python
    policy = load_policy("runs/cartpole")
    environment = policy.make_environment(num_envs=1, seed=0)
    timestep = environment.reset()
    action = policy(timestep.observation)               # [B, ...] to [B, ...]
    ```

    Attributes:
      agent: the agent, as configured in the run, but on the CPU.
      spec: the specs of its environment.
      networks: the networks with the parameters of the checkpoint, on the CPU.
      config: the run's settings.
      step: env steps of the run when the checkpoint was saved.
      checkpoint: folder of the checkpoint.
    """

    def __init__(
        self, folder: RunFolder, reader: CheckpointReader, best: bool = False, allow: Collection[str] = ()
    ):
        self.agent = folder.with_device("cpu").make_agent(allow)  # This machine need not have the run's GPU.
        self._factory, self.config = folder.environment_factory(), folder.config
        with RaisedAs(RunError, (ValueError, TypeError, ImportError), f"{folder.path}: "):
            self.spec = environment_spec(self.agent, self._factory, folder.config)
        RunFolder.describe(self.agent, self._factory, folder.config, self.spec).check_same()
        self.networks = self.agent.make_networks(self.spec)
        self.step, self.checkpoint = reader.step, reader.path
        self._load(reader, best)
        if isinstance(self.networks, torch.nn.Module):
            self.networks.eval()
        self._policy = self.agent.make_policy(self.networks, evaluation=True)
        self._state: Any = None
        self._envs = 0

    def __call__(self, observation: Any) -> Any:
        """The actions for a nest of `[B, ...]`. Recurrent policies keep their state until `reset`.

        Raises:
          ValueError: A leaf does not have the shape `[B, *shape]` of its spec, with the same B for all
            leaves.
        """
        observation = specs.batch("observation", self.spec.observations, observation, converts=False)
        envs = len(tree.flatten(observation)[0])
        if self._state is None or envs != self._envs:
            self._envs, self._state = envs, self._policy.initial_state(envs)
        action, _, self._state = self._policy.step(observation, self._state)
        return action

    def reset(self) -> None:
        """Starts new episodes in all envs."""
        self._state = None

    def make_actor(self, num_envs: int, seed: int = 0) -> Any:
        """A `PolicyActor` that stores nothing."""
        return PolicyActor(self._policy, num_envs=num_envs, seed=seed)

    def make_environment(self, num_envs: int = 1, seed: int = 0, render_mode: str | None = None) -> Any:
        """The run's environment, as evaluations make it.

        Its episode i begins with the seed `EVALUATION_SEED + seed + i`; see `SeededEpisodes`.
        """
        return make_environment(
            self.agent, self._factory, self.config, num_envs, seed, render_mode, evaluation=True
        )

    def _load(self, reader: CheckpointReader, best: bool) -> None:
        if best and "best" not in reader.names:
            raise RunError(
                f"{reader.path}: got no best parameters, because it was saved before the first evaluation. "
                "Omit --checkpoint to use the newest parameters."
            )
        if best:
            kept = reader.state("best")
            # It has the variables that the policy names; the others keep their initial values.
            self.networks.load_state_dict({**self.networks.state_dict(), **kept["networks"]})
            self.step = int(kept["row"].get("env_steps", kept["row"]["learner_steps"]))
        elif "learner" in reader.names:
            learner = self.agent.make_learner(self.networks, self.spec)
            learner.restore(reader.state("learner", "learner"))
            for name, state in learner.parameters().items():
                getattr(self.networks, name).load_state_dict(state)
        elif isinstance(self.networks, torch.nn.Module) and any(True for _ in self.networks.parameters()):
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
      checkpoint: None for the newest checkpoint, "best" for the parameters of the best evaluation,
        "previous", a step, or a folder.
      allow: modules whose objects the run may name as its agent, environment or parts, such as
        `("my_lab",)`. Registered names need none.

    Raises:
      RunError: The run or its checkpoint cannot be read, or it names code of another module.
    """
    folder = RunFolder.open(run)
    folder.check_names(allow)
    best = checkpoint == "best"
    reader = folder.restore(None if best else checkpoint)
    with RaisedAs(RunError, CheckpointError):
        return LoadedPolicy(folder, reader, best, allow)
