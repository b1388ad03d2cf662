"""A policy outside of a program: greedy, in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import tree

from framework import core, specs
from framework.actors import PolicyActor
from framework.actors.acting import restarted
from framework.own_settings import OwnSettings, in_own_settings, seeded
from framework.runs.run_config import RunConfig
from framework.variables import VariableClient
from framework.workers.worker import Setup
from launch.engines.base import Job


class GreedyPolicy:
    """The greedy policy of an agent, with memory, for any number of envs.

    Args:
      make_environment: `(num_envs, seed, render_mode, evaluation=True)` makes the run's environment.

    Attributes:
      agent: the agent.
      spec: the specs of its environment.
      config: the run's settings.
      networks: the networks with the parameters, on the CPU.
      step: env steps of the run when it had these parameters.
      has_memory: whether actions depend on earlier observations; False before the first call.
    """

    settings = OwnSettings()

    @in_own_settings
    def __init__(
        self,
        agent: core.Agent,
        spec: specs.EnvironmentSpec,
        config: RunConfig,
        networks: Any,
        make_environment: Callable[..., Any],
        step: int,
    ):
        self.agent, self.spec, self.config = agent, spec, config
        self.networks, self.step, self._make_environment = networks, step, make_environment
        if isinstance(self.networks, torch.nn.Module):
            self.networks.eval()
            self.settings = OwnSettings(self.networks.parameters())
        self._policy = self.agent.make_policy(self.networks, evaluation=True)
        self._state: Any = None
        self.has_memory = False
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
        if self.has_memory and before is not None:
            before = self._restarted(before, envs, start_of_episode)
        elif before is None or envs != self._envs:
            before = self._policy.initial_state(envs)
        action, _, self._state = self._policy.step(given, before)
        leaves = zip(tree.flatten(before), tree.flatten(self._state), strict=True)
        self.has_memory, self._envs = any(old is not new for old, new in leaves), envs
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
        """Where episodes begin in a time step, also for single agents; see `Policy.begins`."""
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
        """
        return self._make_environment(num_envs, seed, render_mode, evaluation=True)


def live_policy(setup: Setup, job: Job) -> GreedyPolicy:
    """The policy with the newest parameters of the learner of a running program."""
    with seeded(0):
        networks = setup.agent.make_networks(setup.spec)
    policy = setup.agent.make_policy(networks, evaluation=True)
    VariableClient(job.client("learner"), networks, policy).update(wait=True)
    make, step = setup.make_environment, policy.progress.env_steps
    return GreedyPolicy(setup.agent, setup.spec, setup.config, networks, make, step)
