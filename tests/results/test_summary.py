"""Agents beside each other over several tasks."""

import json

import numpy as np
import pytest

from results import summary

SUITE = summary.Suite("two tasks", ("slow", "fast", "unknown"), {"easy": (0.0, None), "hard": (-10.0, 10.0)})


def run(seed, *returns, cpu_seconds=30.0):
    steps = [100.0, 200.0, 300.0]
    curve = {"env_steps": steps, "hours": [0.1, 0.2, 0.3], "greedy": list(returns)}
    return {
        "seed": seed,
        "return": returns[-1],
        "cpu_seconds": cpu_seconds,
        "wall_seconds": 60.0,
        "curve": curve,
    }


@pytest.fixture
def folder(tmp_path):
    records = {
        "easy-slow": [run(1, 0, 2, 4), run(2, 0, 2, 4)],
        "hard-slow": [run(1, -10, -10, 0), run(2, -10, -10, 0)],
        "easy-fast": [run(1, 8, 8, 8), run(2, 8, 8, 8)],
        "hard-fast": [run(1, 10, 10, 10, cpu_seconds=60.0), run(2, 10, 10, 10)],
        "easy-unknown": [run(1, 0, 0, 0)],  # It has no record of the other task.
    }
    for name, runs in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"runs": runs}))
    return tmp_path


def test_scores_are_between_the_ends_of_each_task(folder):
    runs = summary.read(SUITE, folder)
    ends = summary.ends_of(SUITE, runs)
    assert list(runs) == ["slow", "fast"] and ends == {"easy": (0.0, 8.0), "hard": (-10.0, 10.0)}
    x, (easy, hard) = summary.scores(runs["slow"], ends, "env_steps")
    assert (x[0], x[-1]) == (100, 300) and easy.shape == hard.shape == (2, summary.POINTS)
    np.testing.assert_allclose((easy[:, 0], easy[:, -1]), ([0, 0], [0.5, 0.5]))
    np.testing.assert_allclose((hard[:, 0], hard[:, -1]), ([0, 0], [0.5, 0.5]))


def test_cpu_hours_are_what_all_runs_have(folder):
    runs = summary.read(SUITE, folder)
    x, _ = summary.scores(runs["fast"], summary.ends_of(SUITE, runs), "hours")
    np.testing.assert_allclose((x[0], x[-1]), (0.1, 0.15))  # One of its runs was twice as busy.


def test_the_picture_has_the_last_interquartile_means(folder, monkeypatch):
    other = summary.Suite("no records", ("slow",), {"other": (0.0, 1.0)})
    monkeypatch.setattr(summary, "SUITES", (other, SUITE))
    last = summary.draw(folder, folder / "summary.png")
    assert last == {"two tasks": {"slow": (0.5, 0.5, 0.5), "fast": (1.0, 1.0, 1.0)}}
    assert (folder / "summary.png").read_bytes().startswith(b"\x89PNG")
