"""Loads the policy of a run from its folder."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
import tree

from framework import specs
from framework.actors import PolicyActor
from framework.actors.acting import restarted
from framework.checkpoints import CheckpointError, CheckpointReader
from framework.config_checks import RaisedAs
from framework.own_settings import OwnSettings, in_own_settings, seeded
from framework.parameters import load_state, state_of
from framework.programs.make import environment_spec, make_environment
from framework.runs import recorded_specs
from framework.runs.run_folder import RunError, RunFolder


class LoadedPolicy:
    """The greedy policy of a run.

    ```python
    policy = load_policy("runs/cartpole")
    environment = policy.make_environment(num_envs=1, seed=0)
    timestep = environment.reset()
    action = policy(timestep.observation, timestep.first())               # [B, ...] to [B, ...]
    ```

    Attributes:
      agent: the agent, as configured in the run, but on the CPU.
      spec: the specs of its environment.
      networks: the networks with the parameters of the checkpoint, on the CPU.
      folder: the run's folder.
      config: the run's settings.
      step: env steps of the run when the checkpoint was saved, or at its best evaluation.
      checkpoint: folder of the checkpoint.
      is_best: whether the parameters are those of the best evaluation.
    """

    settings = OwnSettings()

    @in_own_settings
    def __init__(
        self, folder: RunFolder, reader: CheckpointReader, best: bool = False, allow: Collection[str] = ()
    ):
        self.agent = folder.with_device("cpu").make_agent(allow)  # This machine need not have the run's GPU.
        self.folder, self.config = folder, folder.config
        spec = recorded_specs.restored(folder.environment_spec)
        if spec is None:  # The folder does not say enough, so the environment has to.
            factory = folder.environment_factory()
            with RaisedAs(RunError, (ValueError, TypeError, ImportError), f"{folder.path}: "):
                spec = environment_spec(self.agent, factory, folder.config)
            RunFolder.describe(self.agent, factory, folder.config, spec).check_same()
        self.spec = spec
        self.step, self.checkpoint, self.is_best = reader.step, reader.path, best
        with seeded(0):
            self.networks = self.agent.make_networks(self.spec)
            self._load(reader, best)
        if isinstance(self.networks, torch.nn.Module):
            self.networks.eval()
            self.settings = OwnSettings(self.networks.parameters())
        self._policy = self.agent.make_policy(self.networks, evaluation=True)
        self._state: Any = None
        self._has_memory = False
        self._envs = 0

    @in_own_settings
    def __call__(self, observation: Any, start_of_episode: Any = None) -> Any:
        """The actions for a nest of `[B, ...]`; see `Session.act` for the observations that it takes.

        Args:
          observation: the observations of the envs, arrays or tensors.
          start_of_episode: bool `[B]`, the envs in which an episode begins with this observation:
            `timestep.first()`. A policy with a memory restarts it there. With a single env, `reset` can be
            called instead. For several agents, the result of `begins(timestep)`.

        Raises:
          ValueError: An observation does not fit the spec. A policy with a memory acts for several envs, and
            was not told where episodes begin, or got another number of envs than before.
        """
        arrays = specs.batch("observation", self.spec.observations, observation)
        given = tree.map_structure_up_to(
            arrays,
            lambda old, new: torch.as_tensor(new) if torch.is_tensor(old) else new,
            observation,
            arrays,
        )
        envs, before = len(tree.flatten(arrays)[0]), self._state
        if self._has_memory and before is not None:
            before = self._restarted(before, envs, start_of_episode)
        elif before is None or envs != self._envs:
            before = self._policy.initial_state(envs)
        action, _, self._state = self._policy.step(given, before)
        leaves = zip(tree.flatten(before), tree.flatten(self._state), strict=True)
        self._has_memory, self._envs = any(old is not new for old, new in leaves), envs
        return action

    def _restarted(self, state: Any, envs: int, start_of_episode: Any) -> Any:
        if envs != self._envs:
            raise ValueError(
                f"observation: got {envs} envs, expected {self._envs} as before, since this policy has a "
                "memory. Call reset() to begin with others."
            )
        of_agents = bool(specs.agents(self.spec))
        if start_of_episode is None and envs == 1 and not of_agents:
            return state
        if start_of_episode is None or (of_agents and not tree.is_nested(start_of_episode)):
            raise ValueError(
                f"start_of_episode: got {start_of_episode!r:.80}, expected the envs in which an episode "
                "begins, since this policy has a memory. Pass timestep.first(), or begins(timestep) for "
                "several agents."
            )
        if not of_agents:
            start_of_episode = specs.flags("start_of_episode", start_of_episode, envs)
        return restarted(state, self._policy.initial_state(envs), start_of_episode)

    def begins(self, timestep: Any) -> Any:
        """Where episodes begin in a time step, also those of single agents; see `Policy.begins`."""
        return self._policy.begins(timestep)

    def reset(self) -> None:
        """Starts new episodes in all envs."""
        self._state = None

    def make_actor(self, num_envs: int, seed: int = 0) -> Any:
        """A `PolicyActor` that stores nothing."""
        return PolicyActor(self._policy, num_envs=num_envs, seed=seed)

    def make_environment(self, num_envs: int = 1, seed: int = 0, render_mode: str | None = None) -> Any:
        """The run's environment, as evaluations make it.

        Its episode i begins with the seed `EVALUATION_SEED + seed + i`; see `SeededEpisodes`.

        Raises:
          RunError: It cannot be made here, or its specs are not those that the run was trained with.
        """
        factory = self.folder.environment_factory()
        with RaisedAs(RunError, (ValueError, TypeError, ImportError), f"{self.folder.path}: "):
            environment = make_environment(
                self.agent, factory, self.config, num_envs, seed, render_mode, evaluation=True
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
