"""A running DQN program loses one of its processes and still reaches its goal; or loses its launcher.

The counter reports an exact number of steps at the end, also when it was itself the one that died. It
does not know, then, of steps made after its last checkpoint, nor of those of its last grant that an
actor had made when it died: these were made, too.
"""

from __future__ import annotations

import functools
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

import launch
from agents.dqn import DQN, DQNConfig
from framework.checkpoints import Checkpointer
from framework.environments.testing import FakeEnvironment
from framework.loggers import read_jsonl
from framework.programs import RunConfig, make_program

PATIENCE = 60.0
GROUPS = ("actor", "learner", "replay", "evaluator", "counter", "monitor", "checkpointer")
# Enough work that the program is still at it when the killed node is back.
STEPS = 3000


def start(directory, steps=STEPS, checkpoint_period=300, **options):
    config = DQNConfig(
        min_replay_size=50, batch_size=16, samples_per_insert=1.0, hidden_sizes=(16,), insert_burst=64
    )
    program = make_program(
        DQN(config),
        functools.partial(FakeEnvironment, episode_length=7),
        RunConfig(
            num_actors=2,
            envs_per_actor=2,
            max_env_steps=steps,
            evaluate_period=1000,
            num_evaluation_episodes=2,
            log_period=200,
            learner_log_period=20,
            publish_period=5,
            checkpoint_period=checkpoint_period,
            directory=directory,
        ),
    )
    return launch.start(program, "processes", directory=directory, **options)


def node_of(job, group):
    return next(node for node in job.status()["nodes"] if node["group"] == group)


def wait_for_steps(job, steps):
    # After the steps so far: a counter that comes back starts from its checkpoint.
    assert job.client("counter").wait_for("env_steps", steps, timeout=PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "groups",
    [("actor", "monitor"), ("learner", "evaluator"), ("replay",), ("counter", "checkpointer")],
    ids="-".join,
)
def test_any_one_node_may_be_killed(tmp_path, groups):
    """One after another: starting a program takes longer than all the rest."""
    with start(tmp_path, restarts=dict.fromkeys(GROUPS, 1)) as job:
        for number, group in enumerate(groups, 1):
            wait_for_steps(job, 700 * number)
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


@pytest.mark.slow
def test_a_hung_learner_is_found_and_made_anew(tmp_path):
    with start(tmp_path, restarts={"learner": 1}, heartbeat_timeout=15.0) as job:
        wait_for_steps(job, 700)
        os.kill(node_of(job, "learner")["pid"], signal.SIGSTOP)
        assert job.wait(timeout=PATIENCE)["env_steps"] == STEPS
        learner = node_of(job, "learner")
        assert learner["restarts"] == 1
        assert "no sign of life" in learner["error"]


LAUNCHER = """
    import sys
    sys.path.insert(0, {here!r})
    import test_program_restarts as tests

    if __name__ == "__main__":
        with tests.start({directory!r}, steps=10_000_000, checkpoint_period=50_000) as job:
            tests.wait_for_steps(job, 500)
            print(*[node["pid"] for node in job.status()["nodes"]], flush=True)
            job.wait()
"""


@pytest.mark.slow
def test_when_the_launcher_is_killed_everything_ends_and_nothing_stays(tmp_path):
    here, root = os.path.dirname(os.path.abspath(__file__)), os.path.dirname(launch.__path__[0])
    code = textwrap.dedent(LAUNCHER).format(here=here, directory=str(tmp_path / "run"))
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as sockets:  # unix sockets have short names
        environment = {**os.environ, "TMPDIR": sockets, "XDG_RUNTIME_DIR": "", "PYTHONPATH": root}
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
