"""Parameters between hosts: each version crosses the network once for each variable source."""

import json
import pathlib
import sys

import pytest

pytest.importorskip("ray")
NUM_HOSTS = 2
pytestmark = [pytest.mark.ray, pytest.mark.release, pytest.mark.timeout(600)]

PROGRAM = pathlib.Path(__file__).with_name("variables_driver.py")
PATIENCE = 240.0


def run(cluster, *arguments):
    hosts, environment = cluster
    command = [sys.executable, str(PROGRAM), *arguments]
    output = hosts[0].run(command, env=environment, timeout=PATIENCE).stdout
    return json.loads(output.strip().splitlines()[-1])


@pytest.mark.parametrize("way, copies_of_a_version", [("source", 1), ("direct", 4)])
def test_each_version_crosses_the_network_once_for_each_source(real_hosts, way, copies_of_a_version):
    seen = run(real_hosts, way)
    assert seen["hosts"] == ["host1", "host2"]
    assert seen["found"] == [[version, float(version)] for version in (1, 2, 3) for _ in range(4)]
    sent = 3 * copies_of_a_version * seen["size"]
    assert seen["size"] > 4_000_000 and 0.95 * sent < seen["received"] < 2 * sent
    if way == "source":
        assert seen["copies"] == 4  # versions 0 to 3
