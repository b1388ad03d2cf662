"""The page of results says what the files of results say."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


def test_the_table_is_that_of_the_files():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "learning.py"), "--table", "--out", str(RESULTS)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    table = page.split("<!-- table: benchmarks/learning.py -->\n")[1].split("<!-- end of table -->")[0]
    assert table.strip() == done.stdout.strip()


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_row_names_each_seed_once_and_its_steps(file):
    row = json.loads(file.read_text(encoding="utf-8"))
    seeds = [run["seed"] for run in row["runs"]]
    assert seeds and len(set(seeds)) == len(seeds)
    assert all(run["steps"] == row["steps"] and run["commit"] for run in row["runs"])
    assert file.with_suffix(".png").exists()
