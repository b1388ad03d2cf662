"""Learners on two hosts. That they do what one does with the whole batch is tested on one."""

import json
import pathlib
import sys

import pytest

pytest.importorskip("ray")
NUM_HOSTS = 2
pytestmark = [pytest.mark.ray, pytest.mark.release, pytest.mark.timeout(600)]

PROGRAM = pathlib.Path(__file__).with_name("learners_driver.py")
PATIENCE = 240.0


def run(cluster, *arguments):
    hosts, environment = cluster
    command = [sys.executable, str(PROGRAM), *arguments]
    output = hosts[0].run(command, env=environment, timeout=PATIENCE).stdout
    return json.loads(output.strip().splitlines()[-1])


def test_a_program_trains_with_a_learner_on_each_host(cluster, tmp_path):
    result = run(cluster, str(tmp_path))
    assert (result["reason"], result["learner_steps"]) == ("max_learner_steps", 40)
