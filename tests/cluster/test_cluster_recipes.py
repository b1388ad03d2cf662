"""The recipes of `examples/cluster`: files fit the schemas of their readers, and the script of Slurm runs."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import yaml
from patient_ray import free_port

from framework.commands.train import parse_new

jsonschema = pytest.importorskip("jsonschema")  # Ray needs it.
ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.release]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECIPES = ROOT / "examples" / "cluster"
PATIENCE = 240.0  # Seconds.


def recipe(name):
    return yaml.safe_load((RECIPES / name).read_text())


def test_ray_up():
    schema = json.loads((Path(ray.__path__[0]) / "autoscaler" / "ray-schema.json").read_text())
    config = recipe("ray_up.yaml")
    jsonschema.validate(config, schema)
    assert config["head_node_type"] in config["available_node_types"]
    with pytest.raises(jsonschema.ValidationError, match="workers_at_all"):
        jsonschema.validate({**config, "workers_at_all": 1}, schema)
    words = (RECIPES / "ray_up.yaml").read_text().replace("\\\n#", "")
    command = words.split("LAUNCH_AUTOSCALING=1 repertory train impala ")[1].split('"')[0]
    _, options, run, _ = parse_new("impala", shlex.split(command))
    assert (options.engine, options.restarts, run.directory) == ("ray", 2, "/runs/impala-pong")
    assert set(run.resources["actor"]["custom"]) <= set(config["available_node_types"]["actors"]["resources"])


def test_kuberay_job():
    schema = json.loads((HERE / "kuberay_rayjob.json").read_text())
    job = recipe("kuberay_job.yaml")
    jsonschema.validate(job, schema)
    groups = [
        job["spec"]["rayClusterSpec"]["headGroupSpec"],
        *job["spec"]["rayClusterSpec"]["workerGroupSpecs"],
    ]
    for group in groups:
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts) == {"/runs", "/dev/shm"} and set(mounts.values()) <= volumes
    again, first = job["spec"]["entrypoint"].removesuffix("; fi").split("; else ")
    assert again.endswith("; then repertory train --resume /runs/impala-pong")
    entry, _, config, _ = parse_new("impala", shlex.split(first)[3:])
    assert (entry.name, config.directory, config.num_envs) == ("impala", "/runs/impala-pong", 256)
    del groups[0]["template"]["spec"]["containers"][0]["name"]
    with pytest.raises(jsonschema.ValidationError, match="name"):
        jsonschema.validate(job, schema)


# Slurm as far as one machine can be it: `srun` runs the command here, in place of itself.
FAKES = {
    "srun": """while [[ $1 == --* ]]; do shift; done
        if [ "$1" = hostname ]; then echo 127.0.0.1; else exec "$@"; fi""",
    "scontrol": 'if [ "$1" = show ]; then printf "one\\ntwo\\n"; else echo "$@" >> "$RUNS/scontrol"; fi',
    "repertory": f'exec "{sys.executable}" -c "from framework.commands.cli import main; exit(main())" "$@"',
}


@pytest.fixture
def slurm(tmp_path):
    """Starts the script as job 7 of Slurm, with two hosts, which are this machine."""
    tools, runs, home = tmp_path / "bin", tmp_path / "runs", tmp_path / "home"
    for folder in (tools, runs, home):
        folder.mkdir()
    for name, text in FAKES.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    short = tempfile.mkdtemp(prefix="ray-")  # Paths of sockets are short.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    ours = {"PATH": path, "PYTHONPATH": str(ROOT), "RAY_raylet_start_wait_time_s": "300"}
    folders = {"HOME": str(home), "RUNS": str(runs), "RAY_TMPDIR": short}
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "[one-two]", "SLURM_CPUS_PER_TASK": "4"}
    environment = {**inherited, **ours, **folders, **job}
    started = []

    def start(*arguments):
        script = ["bash", str(RECIPES / "slurm.sh"), *arguments]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(script, env={**environment, "RAY_PORT": str(free_port())}, **options)
        started.append(process)
        return process

    yield runs / "7", start
    for process in [each for each in started if each.poll() is None]:  # The test has failed.
        family = [*psutil.Process(process.pid).children(recursive=True), process]
        for each in family:
            each.kill()
    shutil.rmtree(short, ignore_errors=True)


def rows(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # The last one may not be whole yet.


def test_a_job_of_slurm_whose_time_is_over_continues(slurm):
    run, start = slurm
    flags = ["--environment", "gymnasium:CartPole-v1", "--num-actors", "1", "--max-env-steps", "12000"]
    flags += ["--evaluate-period", "None", "--target-return", "None", "--resources", "actor.num_cpus=1"]
    first, deadline = start("dqn", *flags), time.monotonic() + PATIENCE
    while not rows(run):
        assert first.poll() is None and time.monotonic() < deadline, first.communicate(timeout=PATIENCE)[0]
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate(timeout=PATIENCE)
    assert first.returncode == 0, output
    assert (run.parent / "scontrol").read_text() == "requeue 7\n", output
    second = start("dqn", *flags)
    output, _ = second.communicate(timeout=PATIENCE)
    assert second.returncode == 0, output
    found = rows(run)
    assert found[-1]["env_steps"] == 12_000
    assert any(0 < row.get("resumed_at", 0) < 12_000 for row in found)
