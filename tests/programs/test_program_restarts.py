"""A running DQN program loses one of its processes and still reaches its goal; or loses its launcher.

The counter reports an exact number of steps at the end, also when it was itself the one that died. It
does not know, then, of steps made after its last checkpoint, nor of those of its last grant that an
actor had made when it died: these were made, too.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import signal
import subprocess
import tempfile
import textwrap

import psutil
import pytest
import warm_python
from helpers.small_programs import SMALL, small_program

import launch
from agents.dqn import DQN
from framework.checkpoints import Checkpointer
from framework.loggers import read_jsonl

PATIENCE = 60.0
GROUPS = ("actor", "learner", "monitor", "evaluator", "replay", "counter", "checkpointer")
# Enough work that the program is still at it when the killed node is back.
STEPS = 2500


def start(directory, steps=STEPS, checkpoint_period=300, **options):
    settings = {"num_actors": 2, "envs_per_actor": 2, "evaluate_period": 1000, "log_period": 200}
    settings |= {"max_env_steps": steps, "checkpoint_period": checkpoint_period, "directory": directory}
    agent = DQN(dataclasses.replace(SMALL, samples_per_insert=1.0))
    return launch.start(small_program(agent, **settings), "processes", directory=directory, **options)


def node_of(job, group):
    return next(node for node in job.status()["nodes"] if node["group"] == group)


def wait_for_steps(job, steps):
    # After the steps so far: a counter that comes back starts from its checkpoint.
    assert job.client("counter").wait_for("env_steps", steps, timeout=PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "groups",
    [("actor", "learner", "monitor", "evaluator"), ("replay", "counter", "checkpointer")],
    ids="-".join,
)
def test_any_one_node_may_be_killed(tmp_path, groups):
    """One after another: starting a program takes longer than all the rest."""
    with start(tmp_path, restarts=dict.fromkeys(GROUPS, 1)) as job:
        for number, group in enumerate(groups, 1):
            wait_for_steps(job, 500 * number)
            os.kill(node_of(job, group)["pid"], signal.SIGKILL)
        result = job.wait(timeout=PATIENCE)
        assert result["reason"] == "max_env_steps"
        assert result["env_steps"] == STEPS
        restarts = {node["label"]: node["restarts"] for node in job.status()["nodes"]}
        # Nobody else came to harm.
        assert {label for label, count in restarts.items() if count} == {f"{group}-0" for group in groups}
    rows = list(read_jsonl(tmp_path / "metrics.jsonl"))
    for label, name in [("actor-1", "variables_version"), ("learner", "version")]:
        versions = [row[name] for row in rows if row["label"] == label]
        assert versions == sorted(versions)  # they grow, whoever has died
        assert versions[-1] > versions[0]


LAUNCHER = """
    import test_program_restarts as tests

    if __name__ == "__main__":
        with tests.start({directory!r}, steps=10_000_000, checkpoint_period=50_000) as job:
            tests.wait_for_steps(job, 500)
            print(*[node["pid"] for node in job.status()["nodes"]], flush=True)
            job.wait()
"""


@pytest.mark.slow
def test_when_the_launcher_is_killed_everything_ends_and_nothing_stays(tmp_path):
    code = textwrap.dedent(LAUNCHER).format(directory=str(tmp_path / "run"))
    root = os.path.dirname(launch.__path__[0])
    path = f"{root}:{root}/tests:{root}/tests/programs"
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as sockets:  # unix sockets have short names
        environment = {**os.environ, "TMPDIR": sockets, "XDG_RUNTIME_DIR": "", "PYTHONPATH": path}
        process = warm_python.Popen(["-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        nodes = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(nodes) == 8
        job = json.loads((tmp_path / "run" / "status.json").read_text())["job"]
        assert glob.glob(f"/dev/shm/lp-{job}*")
        everyone = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate(timeout=PATIENCE)
        _, alive = psutil.wait_procs([*nodes, *everyone], timeout=PATIENCE)
        assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
        assert glob.glob(f"/dev/shm/lp-{job}*") == []
        # It was saved at the end: by itself the first is due after 50,000 steps or five minutes.
        checkpointer = Checkpointer(tmp_path / "run" / "checkpoints")
        assert len(checkpointer.checkpoints()) == 1
        checkpoint = checkpointer.restore()
        assert checkpoint.step >= 500 and "replay" in checkpoint.names
        assert [name for name in os.listdir(sockets) if name.startswith("lp-")] == []
