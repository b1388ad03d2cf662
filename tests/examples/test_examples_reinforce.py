"""The on-policy example learns, and takes continuous actions and action masks."""

import pathlib
import runpy

import pytest

import launch
from framework.programs import RunConfig, make_program

EXAMPLE = runpy.run_path(str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "reinforce.py"))


@pytest.mark.release
@pytest.mark.timeout(300)
def test_reinforce_learns():
    # Random actions get about 22.
    assert EXAMPLE["main"](max_env_steps=40_000)["episode_return"] > 150


# `testing:Masked` ends the run at the first illegal action.
@pytest.mark.parametrize("environment", ["gymnasium:Pendulum-v1", "testing:Masked"])
def test_reinforce_takes_continuous_actions_and_masks(environment):
    config = RunConfig(num_actors=1, envs_per_actor=2, max_env_steps=512, seed=1)
    program = make_program(EXAMPLE["Reinforce"](), environment, config)
    assert launch.launch(program, engine="serial")["learner_steps"] == 4
