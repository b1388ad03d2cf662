"""Runs that begin with another run's parameters."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from helpers.small_programs import FAKE, SETTINGS, SMALL
from torch import nn

import launch
from agents.dqn import DQN
from framework.checkpoints import torch_part
from framework.environments.testing import FakeEnvironment, make_spec
from framework.programs import RunConfig, make_program
from framework.runs import initial
from framework.runs.run_folder import RunError, RunFolder


class Networks(nn.Module):
    """A part that acts, one that does not, and statistics."""

    def __init__(self, width: int = 3, value: float = 0.0):
        super().__init__()
        self.policy, self.critic = nn.Linear(2, width), nn.Linear(1, 1)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        for tensor in self.state_dict().values():
            tensor.fill_(value)

    def values(self):
        return {name: tensor.flatten()[0].item() for name, tensor in self.state_dict().items()}


@pytest.fixture
def saved(tmp_path):
    """A run with a checkpoint whose learner's parameters are 1, and whose best evaluation's are 2."""
    folder = RunFolder.describe(DQN(SMALL), FAKE, RunConfig(directory=str(tmp_path / "a:b")), make_spec())
    folder.save()
    best = {name: of for name, of in Networks(value=2.0).state_dict().items() if name.startswith("policy")}
    one = {"networks": Networks(value=1.0).state_dict(), "optimizer": {}}
    several = {"steps": {"a": 7}, "a": one, "b": {**one, "networks": Networks(2, 3.0).state_dict()}}
    parts = {"learner": {"learner": one}, "best": {"networks": best, "row": {}}, "pair": {"learner": several}}
    folder.checkpointer.save(7, {name: torch_part(part) for name, part in parts.items()})
    return folder.path


@pytest.mark.parametrize(
    ("which", "expected"), [("", [1, 1, 1]), (":7", [1, 1, 1]), (":latest", [1, 1, 1]), (":best", [0, 2, 0])]
)
def test_parameters_and_statistics_are_copied(saved, which, expected):
    networks = Networks()
    initial.load(f"{saved}{which}", networks)
    assert [networks.values()[name] for name in ("mean", "policy.bias", "critic.weight")] == expected


def test_of_several_policies_all_are_copied_but_for_their_counts(saved):
    networks = nn.ModuleDict({"a": Networks(), "b": Networks(2), "steps": nn.Module()})
    networks["steps"].register_buffer("a", torch.zeros((), dtype=torch.int64))
    initial.load(str(saved), networks, "pair")
    assert networks["a"].values()["mean"] == 1 and networks["b"].values()["policy.weight"] == 3
    assert networks["steps"].a == 0


@pytest.mark.parametrize(
    ("init", "networks", "error"),
    [
        (
            "{}",
            Networks(4),
            r"policy.weight: got shape \[3, 2\], expected \[4, 2\]; policy.bias: got shape \[3\]",
        ),
        ("{}:best", Networks(4), r"policy.weight: got shape \[3, 2\], expected \[4, 2\]"),
        (
            "{}",
            nn.Linear(2, 3),
            r"weight: got none; .*critic.bias: got shape \[1\], expected no such parameter",
        ),
        ("{}:77", Networks(), "init: There is no checkpoint '77' in .*it has checkpoint-000001-step-7"),
        ("{}/none", Networks(), "init: .*/none is not a run"),
    ],
)
def test_what_does_not_fit_is_named(saved, init, networks, error):
    before = {name: value.clone() for name, value in networks.state_dict().items()}
    with pytest.raises(ValueError, match=error):
        initial.load(init.format(saved), networks)
    assert all(torch.equal(value, before[name]) for name, value in networks.state_dict().items())


def run(directory, engine="serial", environment=FAKE, init=None, **settings):
    """Trains; returns the parameters in the last checkpoint, and the part of the learner."""
    config = {key: settings.pop(key) for key in [*settings] if key in RunConfig.__dataclass_fields__}
    agent = DQN(dataclasses.replace(SMALL, **settings))
    config = RunConfig(**{**SETTINGS, "max_env_steps": 150, "directory": str(directory), **config})
    launch.launch(make_program(agent, environment, config, init=init), engine)
    state = RunFolder.open(directory).restore().state("learner", "learner")
    return torch.cat([value.flatten() for value in state["networks"].values()]), state


def test_a_run_begins_with_the_parameters_of_another_and_goes_on_as_any(tmp_path):
    first, earlier = run(tmp_path / "first")
    # Another environment with the same specs, other settings, and a learning rate that changes nothing.
    other = FakeEnvironment
    settings = {"learning_rate": 0.0, "target_update_period": 1_000, "init": tmp_path / "first"}
    again, state = run(tmp_path / "second", environment=other, num_actors=2, max_env_steps=110, **settings)
    assert torch.equal(first, again)
    assert 0 < state["steps"] < earlier["steps"]
    assert all(torch.equal(state["targets"][name], state["networks"][name]) for name in state["targets"])
    assert RunFolder.open(tmp_path / "second").config.init == str(tmp_path / "first")
    shutil.rmtree(tmp_path / "first")
    settings |= {"engine": "threads", "max_env_steps": 200}  # It is not read again.
    after, later = run(tmp_path / "second", environment=other, num_actors=2, **settings)
    assert torch.equal(again, after) and later["steps"] > state["steps"]
    with pytest.raises(RunError, match=f"where init='{tmp_path / 'second'}' begins with this run"):
        run(tmp_path / "second", environment=other, num_actors=1, **settings)


def test_a_run_of_another_environment_or_of_other_networks_is_refused_before_it_starts(tmp_path):
    run(tmp_path / "first")
    with pytest.raises(ValueError, match=r"init: got a run in .* with other specs: observations: got"):
        run(tmp_path / "a", environment="gymnasium:CartPole-v1", init=tmp_path / "first")
    state = torch.random.get_rng_state()
    with pytest.raises(ValueError, match=r"q.*: got shape \[16, \d+\], expected \[8, \d+\]"):
        run(tmp_path / "b", hidden_sizes=(8,), init=tmp_path / "first")
    assert torch.equal(state, torch.random.get_rng_state())
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
