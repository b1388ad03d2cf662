"""The engine ``ray`` under Ray's job server (``ray job submit``), and on a cluster that it finds itself."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from patient_ray import free_port, started

import launch as lp

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.release,
    pytest.mark.skipif(
        importlib.util.find_spec("aiohttp") is None,
        reason='Ray has no job server here, so "ray job submit" is NOT tested: pip install "ray[default]"',
    ),
]

ROOT = Path(lp.__path__[0]).parent
PATIENCE = 240.0
START = "RAY_raylet_start_wait_time_s"  # How long Ray may take to start; see conftest.py.

PROGRAM = """
    import launch as lp
    import elsewhere                                  # a module that only the job's folder has

    class Adder:
        def add(self, a, b):
            print(f"adding {a} and {b}")
            return elsewhere.plus(a, b)

    def main(adder):
        lp.stop(sum(adder.futures.add(i, 1).result() for i in range(10)))

    program = lp.Program("job")
    adder = program.add_node(lp.CourierNode(Adder), label="adder")
    program.add_node(lp.PyNode(main, adder), label="main")
    if __name__ == "__main__":
        {before}
        print("the sum is", lp.launch(program, engine="ray", resources={"adder": {"num_cpus": 1}}))
"""


@pytest.fixture(scope="module")
def cluster():
    """A head with its dashboard, which is the job server; in processes of its own."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    arguments = {"include_dashboard": True, "dashboard_port": free_port(), "num_cpus": 4}
    arguments["object_store_memory"] = 100 << 20
    cluster = started(lambda: Cluster(initialize_head=True, head_node_args=arguments))
    yield cluster
    cluster.shutdown()


@pytest.fixture
def folder(tmp_path):
    """Of the job; ``write(before)`` puts the program there, with what it does before it launches."""
    (tmp_path / "elsewhere.py").write_text("def plus(a, b):\n    return a + b\n")

    def write(before="pass"):
        (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM).replace("{before}", before))
        return tmp_path

    return write


def run(command, folder, **environment):
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_") or name == START
    }
    ours = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    options = {"capture_output": True, "text": True, "timeout": PATIENCE}
    done = subprocess.run(command, cwd=folder, env={**inherited, **ours, **environment}, **options)
    return done.returncode, done.stdout + done.stderr


def submit(cluster, folder):
    """``ray job submit``: ``(exit code, what the driver and the nodes wrote)``."""
    ray = Path(sys.executable).with_name("ray")
    server = f"http://{cluster.head_node.address_info['webui_url']}"
    settings = ["--working-dir", ".", "--runtime-env-json", f'{{"env_vars": {{"PYTHONPATH": "{ROOT}"}}}}']
    command = [str(ray), "job", "submit", "--address", server, *settings, "--", sys.executable, "program.py"]
    return run(command, folder)


OWNER = """
    import ray
    ray.init(address="local", num_cpus=0, include_dashboard=False)
    print("started", flush=True)
    input()
"""


def test_a_program_does_not_join_the_cluster_that_another_program_has_started_for_itself(folder):
    """That one ends with its program, and has no core for this one here."""
    environment = {**os.environ, "RAY_ADDRESS": "", "RAY_USAGE_STATS_ENABLED": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", textwrap.dedent(OWNER)]
    with subprocess.Popen(command, env=environment, **pipes) as owner:
        try:
            assert owner.stdout.readline() == "started\n"
            code, text = run([sys.executable, "program.py"], folder(), RAY_ADDRESS="")
            assert code == 0, text
            assert "the sum is 55" in text
        finally:
            owner.communicate("\n", timeout=PATIENCE)


def test_a_submitted_program_runs_on_the_cluster(cluster, folder):
    code, text = submit(cluster, folder())
    assert code == 0, text
    assert "the sum is 55" in text
    assert "adding 9 and 1" in text, "what nodes print reaches the driver"


TOKEN = "0123456789abcdef0123456789abcdef"


def test_a_cluster_that_expects_a_token(folder, tmp_path):
    """The recipe of `docs/cluster.md`; without `RAY_AUTH_MODE` the error names it."""
    home = tmp_path / "home"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text(TOKEN)
    ray, port = str(Path(sys.executable).with_name("ray")), free_port()
    mode = {"HOME": str(home), "RAY_AUTH_MODE": "token"}
    head = ["start", "--head", f"--port={port}", "--include-dashboard=false", "--num-cpus=2", "--block"]
    environment = {**os.environ, **mode, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": ""}
    with subprocess.Popen([ray, *head, f"--temp-dir=/tmp/ray-{port}"], env=environment) as process:
        try:
            wait_for_port(port)
            address = {"RAY_ADDRESS": f"127.0.0.1:{port}"}
            code, text = run([sys.executable, "program.py"], folder(), **mode, **address)
            assert code == 0, text
            assert "the sum is 55" in text
            code, text = run([sys.executable, "program.py"], folder(), HOME=str(home), **address)
            assert code != 0
            assert "RAY_AUTH_MODE" in text
        finally:
            process.terminate()


def wait_for_port(port):
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"nothing listens at {port}")
