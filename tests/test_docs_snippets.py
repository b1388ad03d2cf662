"""The snippets of pages for newcomers run as they stand there; those of other libraries where these are."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
import shutil

import pytest

import framework

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
OTHERS = ("stable_baselines3", "ray")


def snippets(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("code", snippets("coming_from.md"), ids=lambda code: code.split()[1])
def test_both_sides_of_a_pair_run(code, tmp_path, monkeypatch):
    for name in OTHERS:
        if f"from {name}" in code and importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    if "run" in names:
        assert names["run"].result["reason"] in ("max_env_steps", "target_return")
        assert names["run"].policy("latest").step >= names["run"].config.max_env_steps
    if "mean" in names:
        assert 8 <= names["mean"] <= 500


def test_the_lines_for_notebooks_run(tmp_path, monkeypatch):
    (code,) = snippets("notebooks.md")
    monkeypatch.chdir(tmp_path)
    short = {"max_env_steps": 600, "evaluate_period": 200, "num_evaluation_episodes": 2, "progress": False}
    train = functools.partial(framework.train, **short)
    train("ppo", "gymnasium:CartPole-v1", engine="threads", directory="another", seed=2)
    (tmp_path / "runs").mkdir()
    shutil.move("another", "runs/another")
    monkeypatch.setattr(framework, "train", train)
    names = {}
    exec(code, names)
    assert names["columns"]["episode_return"].shape == names["columns"]["env_steps"].shape
    assert (tmp_path / "runs/notebook/video.mp4").exists() and (tmp_path / "curves.png").exists()
