"""The benchmark of Ape-X runs: figures of one of its workers, without a look at them."""

import pathlib
import re

import warm_python

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "apex.py"


def test_the_grid_of_a_worker():
    command = [SCRIPT, "grid", "--environment", "gymnasium:CartPole-v1"]
    command += ["--fragments", "2", "3", "--envs", "1", "2", "--seconds", "0.2"]
    done = warm_python.run(command, capture_output=True, text=True, timeout=100, check=True)
    head, _, *rows = done.stdout.strip().splitlines()
    assert head == "| fragment | 1 envs | 2 envs |"
    assert [row.split("|")[1].strip() for row in rows] == ["2", "3"]
    cells = [cell for row in rows for cell in row.split("|")[2:-1]]
    assert all(int(rate) > 0 for cell in cells for rate in re.findall(r"\d+", cell.replace(",", "")))
