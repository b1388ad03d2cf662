"""PPO keeps the point of a simulator of tensors on its line."""

import pathlib
import runpy

EXAMPLE = runpy.run_path(
    str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "tensor_environment.py")
)


def test_the_example_learns():
    assert 50 <= EXAMPLE["main"](max_env_steps=20_000, num_envs=32) <= 100
