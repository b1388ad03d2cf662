"""The on-policy example learns, and takes continuous actions and action masks."""

import pathlib
import runpy

import pytest
import torch

import launch
from framework.programs import RunConfig, make_program

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "reinforce.py"))


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


def test_the_memory_of_the_guide_learns_with_the_states_that_acted():
    guide = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    names = {}
    exec(guide.partition("## An agent with a memory")[2].split("```")[1].removeprefix("python"), names)
    largest, restarts = [], []

    class Policy(names["MemoryPolicy"]):
        def act(self, observation, state):
            drawn, extras, after = super().act(observation, state)
            return drawn, {"after": after[0], **extras}, after

    class Agent(names["MemoryReinforce"]):
        def make_policy(self, networks, evaluation=False):
            return Policy(networks, evaluation)

        def outputs(self, networks, data):
            policy, values = super().outputs(networks, data)
            acted = networks.head(data.extras["after"])
            largest.append(((policy.logits - acted.logits).abs() * data.mask.unsqueeze(-1)).max().detach())
            restarts.append(data.start_of_episode[:, 1:].sum())
            return policy, values

    config = RunConfig(num_actors=1, envs_per_actor=2, max_env_steps=512, seed=1)
    agent = Agent(EXAMPLE["ReinforceConfig"](unroll_length=32))
    launch.launch(make_program(agent, "gymnasium:CartPole-v1", config), engine="serial")
    assert torch.stack(largest).max() < 1e-5 and len(largest) == 8
    assert sum(restarts) > 5  # Episodes begin within unrolls.
