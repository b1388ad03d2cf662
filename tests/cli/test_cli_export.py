"""`repertory export` and `repertory serve`."""

import json
import signal
import sys
import urllib.request

import pytest

from framework.export import load
from framework.programs import load_policy


@pytest.fixture
def run(make_run):
    return make_run(steps=[10, 20], returns=[5.0], agent="ppo", environment="gymnasium:CartPole-v1").path


def test_a_run_is_exported_into_its_folder(repertory, run):
    code, out, err = repertory("export", run, "--checkpoint", "10", "--no-greedy")
    assert (code, err) == (
        0,
        "",
    ) and f"Wrote the policy of step 10 to {run}/policy.pt2; policy.py acts" in out
    metadata = load(run / "policy.pt2").metadata
    assert (metadata["step"], metadata["greedy"], metadata["return"]) == (10, False, None)


def test_what_cannot_be_exported_or_served_is_told(repertory, make_run, monkeypatch):
    random = make_run("random", steps=[10]).path
    wrong = [
        (("export", random), 1, "got RandomPolicy of RandomActions, which does not act with torch"),
        (
            ("export", random, "--format", "h5"),
            2,
            "--format: got 'h5', expected one of 'onnx', 'saved_model'",
        ),
        (
            ("export", random, "--format", "saved_model"),
            1,
            "expected an agent on Keras with backend 'tensorflow'",
        ),
        (
            ("export", random, "--format", "saved_model", "--no-greedy"),
            1,
            "greedy: got False, expected True: a SavedModel acts as evaluations do.",
        ),
        (("serve", random, "--port", "-1"), 2, "--port: got -1, expected at least 0"),
    ]
    for arguments, status, text in wrong:
        code, _, err = repertory(*arguments)
        assert code == status and text in err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = repertory("serve", random)
    assert code == 1 and "serve needs uvicorn, which is not installed: pip install" in err


@pytest.mark.cpu_budget(40)
def test_a_run_is_served_until_ctrl_c(start, run):
    pytest.importorskip("uvicorn", reason="needs the extra serve")
    process = start("serve", str(run), "--port", "0", stdout=-1, stderr=-1)
    line = process.stdout.readline()
    assert line.startswith(f"Serving {run} on http://127.0.0.1:"), process.stderr.read()
    data = json.dumps({"observations": [[0.0, 0.1, 0.2, 0.3]]}).encode()
    with urllib.request.urlopen(f"{line.rpartition(' ')[2].strip()}/act", data, timeout=30) as answer:
        found = json.load(answer)
    assert found == {"actions": load_policy(run)([[0.0, 0.1, 0.2, 0.3]]).tolist(), "state": None}
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "Interrupted.\n")
