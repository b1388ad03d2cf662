"""A simulator in torch, many envs at once, and PPO on it: a point that is pushed to the middle of a line.

python examples/tensor_environment.py
"""

from __future__ import annotations

import numpy as np
import torch

import launch
from agents.ppo import PPO, PPOConfig
from framework import specs
from framework.environments.tensor_dynamics import TensorDynamics
from framework.programs import RunConfig, make_program

SPEC = specs.EnvironmentSpec(
    observations=specs.Array((2,), np.float32, name="observation"),  # Position and speed.
    actions=specs.BoundedArray((1,), np.float32, -1.0, 1.0, name="action"),  # Acceleration.
    rewards=specs.Array((), np.float32, name="reward"),
    discounts=specs.BoundedArray((), np.float32, 0.0, 1.0, name="discount"),
)


class Line(TensorDynamics):
    """The reward of a step is 1 in the middle, and falls to 0 at the ends, where the episode ends."""

    name, state_size = "line", 2

    def __init__(self, num_envs: int = 1, seed: int | None = None, device: str = "cpu"):
        super().__init__(SPEC, num_envs, seed, device, max_episode_steps=100)

    def begin(self, uniform: torch.Tensor) -> torch.Tensor:
        return uniform - 0.5

    def advance(
        self, state: torch.Tensor, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        position, speed = state
        speed = speed + 0.1 * action[:, 0].clamp(-1.0, 1.0)
        position = position + 0.1 * speed
        return torch.stack((position, speed)), 1.0 - position.abs(), position.abs() > 1.0

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        return state.T.float()


def main(max_env_steps: int = 500_000, num_envs: int = 256, device: str = "cpu") -> float:
    """Trains on `device`; returns the mean return of the last evaluation, at most 100."""
    agent = PPO(PPOConfig(unroll_length=32, epochs=4, minibatch_size=1024, learning_rate=1e-3, device=device))
    settings = RunConfig(
        envs_per_actor=num_envs,
        max_env_steps=max_env_steps,
        evaluate_period=max_env_steps,
        environment_options={"device": device},
    )
    result = launch.launch(make_program(agent, Line, settings), engine="serial")
    return float(result["episode_return"])


if __name__ == "__main__":
    print(f"mean return {main():.1f} of at most 100")
