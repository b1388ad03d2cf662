"""From a run's folder to a policy that acts: for ``eval``, ``video`` and ``agents.load_policy``."""

from __future__ import annotations

import os
from typing import Any

from agents.commands.building import environment_spec
from agents.commands.errors import CommandError
from agents.commands.run_folder import RunFolder, describe_spec
from framework.checkpoints import CheckpointError, CheckpointReader


class LoadedPolicy:
    """What a run has learned, acting greedily.

    ::

        policy = agents.load_policy("runs/cartpole")
        environment = policy.make_environment(num_envs=1, seed=0)
        timestep = environment.reset()
        action = policy(timestep.observation)               # [B, ...] to [B, ...]

    Attributes:
      agent: as it was configured.
      spec: the specs of its environment.
      networks: with the parameters of the checkpoint, on the CPU.
      step: env steps when the checkpoint was saved.
      checkpoint: the folder it was read from.
    """

    def __init__(self, folder: RunFolder, reader: CheckpointReader, best: bool = False):
        self.agent = folder.make_agent()
        self.spec = environment_spec(folder.options.environment, folder.config.seed, self.agent)
        if describe_spec(self.spec) != folder.environment_spec:
            raise CommandError(
                f"{folder.path}: {folder.options.environment!r} is not the environment that the run was "
                f"trained in; it had {folder.environment_spec}. Install the versions that config.json names."
            )
        self.networks = self.agent.make_networks(self.spec)
        self.step, self.checkpoint = reader.step, reader.path
        self._environment, self._stepping = folder.options.environment, folder.config.stepping
        if best:
            self._load_best(reader)
        else:
            self._load(reader)
        self._policy = self.agent.make_policy(self.networks, evaluation=True)
        self._state: Any = None
        self._envs = 0

    def __call__(self, observation: Any) -> Any:
        """The actions for a nest of ``[B, ...]``. Recurrent ones remember until ``reset``.

        ValueError if a leaf has another shape than its spec says, behind the same B for all.
        """
        envs = _envs(observation, self.spec.observations)
        if self._state is None or envs != self._envs:
            self._envs, self._state = envs, self._policy.initial_state(envs)
        action, _, self._state = self._policy.step(observation, self._state)
        return action

    def reset(self) -> None:
        """Starts new episodes in all envs."""
        self._state = None

    def make_actor(self, num_envs: int, seed: int = 0) -> Any:
        """A ``PolicyActor`` that stores nothing."""
        from framework.actors import PolicyActor

        return PolicyActor(self._policy, num_envs=num_envs, seed=seed)

    def make_environment(self, num_envs: int = 1, seed: int = 0, render_mode: str | None = None) -> Any:
        """The run's environment."""
        from framework import environments

        return environments.make(
            self._environment,
            num_envs=num_envs,
            seed=seed,
            stepping="inline" if render_mode else self._stepping,
            render_mode=render_mode,
            wrappers=self.agent.environment_wrappers(),
        )

    def _load(self, reader: CheckpointReader) -> None:
        if "learner" in reader.names:
            learner = self.agent.make_learner(self.networks, self.spec)
            learner.restore(reader.state("learner")["learner"])
            for name, state in learner.parameters().items():
                getattr(self.networks, name).load_state_dict(state)

    def _load_best(self, reader: CheckpointReader) -> None:
        if "best" not in reader.names:
            raise CommandError(
                f"{reader.path} holds no best parameters: nothing was evaluated before it was saved. "
                "Leave --checkpoint out to take the newest."
            )
        best = reader.state("best")
        self.networks.load_state_dict(best["networks"])
        self.step = int(best["row"]["env_steps"])


def _envs(observation: Any, observation_spec: Any) -> int:
    """B of a nest of ``[B, ...]`` that fits the spec."""
    import numpy as np
    import tree

    shapes = [tuple(np.shape(leaf)) for leaf in tree.flatten(observation)]
    expected = [tuple(spec.shape) for spec in tree.flatten(observation_spec)]
    envs = {shape[:1] for shape in shapes}
    if [shape[1:] for shape in shapes] != expected or len(envs) != 1 or () in envs:
        came = tree.map_structure(lambda leaf: str(list(np.shape(leaf))), observation)
        wanted = tree.map_structure(
            lambda spec: f"[{', '.join(map(str, ('B', *spec.shape)))}]", observation_spec
        )
        raise ValueError(
            f"The observation has shape {came}; expected {wanted} for B envs, the same B everywhere. "
            "A single observation needs a batch dimension: observation[None], for each array of a nest."
        )
    return shapes[0][0]


def load_policy(run: str | os.PathLike, checkpoint: str | int | os.PathLike | None = None) -> LoadedPolicy:
    """See ``agents.load_policy``. CommandError if the run or its checkpoint cannot be read."""
    folder = RunFolder.open(run)
    try:
        best = checkpoint == "best"
        reader = folder.checkpointer.restore(None if best else checkpoint)
        return LoadedPolicy(folder, reader, best)
    except CheckpointError as error:
        advice = " Choose another with --checkpoint." if folder.checkpointer.checkpoints() else ""
        raise CommandError(f"{error}{advice}") from error
