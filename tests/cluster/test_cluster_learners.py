"""Learners on two hosts do what one does with the whole batch."""

import json
import pathlib
import sys

import pytest
from hosts import Hosts

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


def test_learners_on_two_hosts_match_one_with_the_whole_batch(cluster):
    seen = run(cluster, "equal")
    has_hosts = isinstance(cluster[0], Hosts)
    if has_hosts:
        assert seen["hosts"] == ["host1", "host2"]
    assert set(seen["agents"]) == {"dqn", "ppo", "impala", "sac"}
    for name, found in seen["agents"].items():
        assert max(found["differences"]) < 1e-5, name
        assert found["moved"] > 1e-2, name
        if has_hosts:
            assert found["addresses"] == [["10.77.0.1"], ["10.77.0.2"]], name  # and no other interface


def test_a_program_trains_with_a_learner_on_each_host(cluster, tmp_path):
    result = run(cluster, "train", str(tmp_path))
    assert (result["reason"], result["learner_steps"]) == ("max_learner_steps", 40)
