"""The page of results says what the files of results say."""

from __future__ import annotations

import importlib
import json
import pathlib
import re

import pytest
import warm_python

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


TABLE = re.compile(r"<!-- table: benchmarks/learning.py(.*?) -->\n(.*?)<!-- end of table -->", re.DOTALL)
PAGES = [ROOT / "docs" / "results.md", *sorted((ROOT / "docs" / "agents").glob("*.md"))]


@pytest.fixture
def learning(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("learning")


def printed(script, *arguments):
    options = {"capture_output": True, "text": True, "timeout": 60, "check": True}
    return warm_python.run([ROOT / "benchmarks" / script, *arguments], **options).stdout.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_those_of_the_files(page):
    tables = TABLE.findall(page.read_text(encoding="utf-8"))
    measured = {json.loads(file.read_text(encoding="utf-8"))["agent"] for file in RESULTS.glob("*.json")}
    assert tables or page.stem not in {"results", *measured}
    for rows, table in tables:
        assert table.strip() == printed("learning.py", *rows.split(), "--table", "--out", RESULTS)


def test_the_table_of_the_distributed_forms_is_that_of_its_files(learning):
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- table: benchmarks/nightly.py -->\n(.*?)<!-- end", page, re.DOTALL)
    assert table.strip() == printed("nightly.py", "--table")
    results = [json.loads(file.read_text(encoding="utf-8")) for file in (RESULTS / "nightly").glob("*.json")]
    runs = [(run, result) for result in results for form in result["runs"].values() for run in form]
    met = [learning.meets(*each) for each in runs if "refused" not in each[0]]
    assert f"\n{met.count(False)} of {len(met)} runs end below their floor" in page


def test_every_row_with_results_is_on_the_page_of_its_agent():
    for file in RESULTS.glob("*.json"):
        agent = json.loads(file.read_text(encoding="utf-8"))["agent"]
        page = {"a3c": "a2c", "impact": "appo"}.get(agent, agent.removeprefix("flow_"))
        page = (ROOT / "docs" / "agents" / f"{page}.md").read_text(encoding="utf-8")
        assert f"| {file.stem} |" in page


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_row_names_each_seed_once_and_its_steps(file):
    row = json.loads(file.read_text(encoding="utf-8"))
    seeds = [run["seed"] for run in row["runs"]]
    assert seeds and len(set(seeds)) == len(seeds)
    assert all(run["steps"] == row["steps"] and run["commit"] for run in row["runs"])
    assert file.with_suffix(".png").exists()


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_row_meets_what_it_asks_or_says_why_not(file, learning):
    result, row = json.loads(file.read_text(encoding="utf-8")), learning.ROWS[file.stem]
    for bound in ("floor", "ceiling", "gain"):
        assert result.get(bound) == getattr(row, bound)
    assert all(learning.meets(run, result) for run in result["runs"]) is (not row.exception)
    worst = min(run["return"] for run in result["runs"])
    assert row.floor is None or worst < 0 or row.exception or row.floor >= round(2 / 3 * worst, 1)


def test_rows_of_peers_are_rows(learning):
    for _, rows, _ in learning.learning_peers.PEERS.values():
        assert set(rows) <= set(learning.ROWS)
