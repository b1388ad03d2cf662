"""The command for machines with a GPU runs to its end on one without."""

import json
import sys

import pytest

from benchmarks import gpu

ROW = {"row": "a", "value": 3.0, "unit": "steps/s", "of": "b", "of_value": 2.0}
SCRIPTS = {
    "cut off after 3 s": "echo '{rows}' > {path}; sleep 60",
    "ended with 7: It crashed.": "echo '{rows}' > {path}; echo It crashed.; exit 7",
    "": "echo '{rows}' > {path}",
}


@pytest.mark.parametrize("trouble", SCRIPTS)
def test_a_part_that_does_not_end_well_has_its_rows_and_says_so(trouble, tmp_path):
    def command(seconds, path):
        return ["-c", SCRIPTS[trouble].format(rows=json.dumps([ROW]), path=path)]

    first, *others = gpu.rows_of(gpu.Part("part", 3, command), "/bin/sh", 3.0, tmp_path, 0)
    assert first == ROW and [row["note"] for row in others] == [trouble] * bool(trouble)
    facts = {"gpus": [], "versions": "torch 3"}
    lines = gpu.table(facts, [{"part": "part", **row} for row in (first, *others)]).splitlines()
    assert lines[0] == "no GPU, torch 3" and lines[4] == "| part | a | 3.0 | steps/s | b | 2.0 | 1.50 |  |"
    assert all(line.count("|") == 9 for line in lines[2:])


def test_what_is_lacking():
    assert gpu.lacking(["torch>=2", "torch<2", "no-such-thing", "mpe2; python_version < '3'"]) == [
        "torch<2",
        "no-such-thing",
    ]


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.cpu_budget(600)
def test_it_runs_to_its_end_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "install", lambda *arguments: (sys.executable, ""))
    gpu.main(["--device=cpu", "--tiny", "--budget=800", f"--output={tmp_path}"])
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    measured = {row["part"] for row in rows if row.get("value")}
    assert measured >= {"learner steps", "learners, NCCL", "prefetch", "inference", "IMPALA in Pong"}
    assert not [row for row in rows if row["row"] == "trouble" and "cut off" not in row["note"]]
    assert (tmp_path / "gpu.md").read_text().count("\n") >= len(rows)
