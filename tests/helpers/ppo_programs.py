"""Programs of PPO, and the batches that their learners were given."""

from __future__ import annotations

from typing import Any

import torch

import launch
from agents.ppo import PPO
from framework.programs import RunConfig, make_program


def play(config: Any, environment: Any, engine: str = "serial", **changes: Any) -> list[tuple[int, Any, Any]]:
    """The learner's steps, its batch, and the distributions' parameters by its networks, for each batch.

    The learner is in this process on the engines serial and threads.
    """
    batches: list[tuple[int, Any, Any]] = []

    class Recorded(PPO):
        def make_learner(self, networks: Any, spec: Any) -> Any:
            learner: Any = super().make_learner(networks, spec)
            step = learner.step

            def record(batch: Any) -> Any:
                batches.append((learner.steps, batch, recompute(learner.networks, batch)))
                return step(batch)

            learner.step = record
            return learner

    settings = {"num_actors": 2, "envs_per_actor": 3, "max_env_steps": 300, "seed": 3, **changes}
    run = RunConfig(evaluate_period=None, num_evaluation_episodes=2, **settings)
    result = launch.launch(make_program(Recorded(config), environment, run), engine=engine)
    assert result["env_steps"] == settings["max_env_steps"]
    return batches


@torch.no_grad()
def recompute(networks: Any, batch: Any) -> dict[str, torch.Tensor]:
    """The distributions' parameters, before the networks learn from the batch."""
    data = batch.data
    starts = torch.as_tensor(data.start_of_episode).clone()
    starts[:, 0] = False
    state = data.extras["state"] if networks.core is not None else ()
    state = tuple(part if part.dim() == 2 else part[:, 0] for part in state)  # Episodes have all rows'.
    policy, _ = networks(networks.normalizer(data.observation), state, starts)
    return {name: value.detach().clone() for name, value in networks.actions.parameters(policy).items()}
