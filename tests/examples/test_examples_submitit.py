"""The submitit recipe on its local executor: a run that is interrupted goes on in the same folder."""

import json
import pathlib
import runpy
import signal
import time

import psutil
import pytest

submitit = pytest.importorskip("submitit")
ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAIN = runpy.run_path(str(ROOT / "examples" / "cluster" / "slurm_submitit.py"))["Train"]
PATIENCE = 90.0  # Seconds.


def rows(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # The last one may not be whole yet.


@pytest.mark.release
@pytest.mark.cpu_budget(60)
@pytest.mark.timeout(300)
def test_an_interrupted_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run, steps = tmp_path / "run", 12_000
    executor = submitit.AutoExecutor(folder=tmp_path / "submitit", cluster="local")
    executor.update_parameters(timeout_min=5)
    job = executor.submit(TRAIN(), str(run), 1, steps)
    deadline = time.monotonic() + PATIENCE
    while not rows(run):
        assert time.monotonic() < deadline, job.stderr()
        time.sleep(0.05)
    (task,) = psutil.Process(int(job.job_id)).children()
    task.send_signal(signal.SIGUSR2)  # As Slurm does before it takes the machine away.
    assert job.result()["env_steps"] == steps
    found = rows(run)
    (checkpoint,) = {row["resumed_at"] for row in found if row.get("resumed")}
    assert 0 < checkpoint < steps
