"""Whole programs on several machines of a real Ray, all of them this one."""

from __future__ import annotations

import functools
import json

import pytest
from patient_ray import RealMachines

import launch as lp
from agents.dqn import DQN, DQNConfig
from framework.commands import cli
from framework.environments.testing import FakeEnvironment
from framework.programs import RunConfig, make_program

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.release, pytest.mark.timeout(600)]
PATIENCE = 240.0


@pytest.fixture(scope="module")
def machines():
    made = RealMachines()
    made.add(left=10)
    yield made
    made.close()


def test_resources_of_the_command_line(machines, tmp_path):
    settings = "--engine ray --num-learners 2 --max-learner-steps 20 --batch-size 4 --evaluate-period None"
    resources = "learner.custom.left=1 learner.num_cpus=1 learner.strategy=STRICT_PACK actor.num_cpus=1"
    arguments = [*settings.split(), "--directory", str(tmp_path / "run"), "--resources", *resources.split()]
    assert cli.main(["train", "impala", *arguments]) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["learner_steps"] == 20


def test_a_program_survives_the_loss_of_the_machine_of_its_replay(machines, tmp_path):
    doomed, steps = machines.add(replay=1), 12_000  # not over before the machine is gone
    config = DQNConfig(min_replay_size=50, batch_size=16, samples_per_insert=1.0, hidden_sizes=(16,))
    evaluations = {"evaluate_period": steps // 2, "num_evaluation_episodes": 2}
    settings = {"envs_per_actor": 2, "max_env_steps": steps, "checkpoint_period": 200}
    run = RunConfig(directory=tmp_path, **settings, **evaluations)
    program = make_program(DQN(config), functools.partial(FakeEnvironment, episode_length=7), run)
    resources = {group: {"custom": {"head": 0.1}} for group in program.groups}
    resources["replay"] = {"custom": {"replay": 1}}
    options = {"directory": tmp_path, "resources": resources, "restarts": {"replay": 1}}
    with lp.start(program, "ray", stop_timeout=60.0, **options) as job:
        assert job.client("counter").wait_for("env_steps", 500, timeout=PATIENCE)
        machines.lose(doomed)
        machines.add(replay=1)
        assert job.wait(timeout=PATIENCE)["env_steps"] == steps
        assert {node["label"] for node in job.nodes() if node["restarts"]} == {"replay-0"}
