"""The errors in docs/faq.md are those that the commands there print."""

from __future__ import annotations

import importlib.util
import pathlib
import re

import fresh_runs
import pytest

from framework.commands import cli
from framework.programs import make_agent

PAGE = (pathlib.Path(__file__).resolve().parents[1] / "docs" / "faq.md").read_text(encoding="utf-8")
CASES = re.findall(r"```sh\nrepertory (.*)\n```\n\n> (.*)\n", PAGE)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of PPO in CartPole with a checkpoint of 30 steps and one evaluation in its rows."""
    path = tmp_path_factory.mktemp("runs") / "run"
    return fresh_runs.make(path, make_agent("ppo"), steps=[30], returns=[1.0], max_env_steps=100).path


def test_the_page_has_twenty_errors():
    assert len(CASES) >= 20 and len(CASES) == PAGE.count("```sh")


@pytest.mark.parametrize(("command", "text"), CASES, ids=[command for command, _ in CASES])
def test_commands_print_what_the_page_says(command, text, run, tmp_path, monkeypatch, capsys):
    for name, package in (("LunarLander", "Box2D"), ("launchpad", "launchpad")):
        if name in command and importlib.util.find_spec(package):
            pytest.skip(f"{package} is installed")
    if "cuda" in command:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main([str(run) if part == "RUN" else part for part in command.split()])
    except SystemExit as error:  # tyro's way out of a value that it cannot read
        code = error.code
    printed = re.sub(r"\s+", " ", capsys.readouterr().err.replace("│", " "))
    pattern = ".*".join(re.escape(part.strip()) for part in text.split("…"))
    assert code in (1, 2) and re.search(pattern, printed), printed
