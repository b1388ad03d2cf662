"""The on-policy example learns, and takes continuous actions and action masks."""

import pathlib
import runpy

import pytest

import launch
from framework.programs import RunConfig, make_program

EXAMPLE = runpy.run_path(str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "reinforce.py"))


@pytest.mark.timeout(300)
def test_reinforce_learns():
    # Random actions get about 22.
    assert EXAMPLE["main"](max_env_steps=40_000)["episode_return"] > 150


def run(environment, max_env_steps):
    config = RunConfig(num_actors=1, envs_per_actor=2, max_env_steps=max_env_steps, seed=1)
    return launch.launch(make_program(EXAMPLE["Reinforce"](), environment, config), engine="serial")


def test_reinforce_takes_continuous_actions():
    result = run("gymnasium:Pendulum-v1", 512)
    assert result["env_steps"] == 512 and result["learner_steps"] == 4


def test_reinforce_takes_masks():
    # The environment ends the run at the first illegal action.
    assert run("testing:Masked", 512)["learner_steps"] == 4
