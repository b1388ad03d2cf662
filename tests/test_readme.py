"""The README's Python runs as it stands there, its commands exist, and pages hold what their markers make."""

from __future__ import annotations

import pathlib
import re

import markers
import pytest
import warm_python

from agents.ppo import PRESETS
from framework.commands import cli
from framework.commands.running import describe_result
from framework.programs import RunConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_ten_lines_train_an_agent(tmp_path):
    program = next(block for block in blocks("python") if "launch.launch" in block)
    assert len([line for line in program.splitlines() if line.strip()]) <= 12
    run = warm_python.run(["-c", program], capture_output=True, text=True, timeout=110, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    reason, episode_return = run.stdout.split()
    assert reason == "max_env_steps" and 8 <= float(episode_return) <= 500  # too short to learn


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\S+)", "\n".join(blocks("sh")), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_commands_of_the_readme_exist():
    assert {*re.findall(r"^repertory (\w+)", README, re.MULTILINE)} <= {*cli.COMMANDS}


FIRST_STEPS = (ROOT / "docs" / "first_steps.md").read_text(encoding="utf-8")
(PRINTED,) = re.findall(r"```text\n(.*?)\n```", FIRST_STEPS, re.DOTALL)


def test_first_steps_show_what_a_run_of_the_preset_prints():
    config = RunConfig(**PRESETS["gymnasium:CartPole-v1"].run)
    numbers = re.findall(r"([\d,]+) (?:env steps|episodes)|learner step ([\d,]+)|: ([\d.]+)\.$", PRINTED)
    steps, episodes, version, score = (float("".join(each).replace(",", "")) for each in numbers)
    result = {"reason": "target_return", "env_steps": int(steps), "episodes": int(episodes)}
    result |= {"variables_version": int(version), "episode_return": score}
    assert describe_result(result, config) == PRINTED and episodes == config.num_evaluation_episodes
    assert steps % config.evaluate_period < 100  # The first pass of all envs after it.
    for page in (README, FIRST_STEPS):
        assert f"{config.max_env_steps:,}" in page


@pytest.mark.release
def test_the_first_run_of_first_steps_ends_as_they_say(tmp_path, capsys):
    command = re.search(r"^repertory (train .*) --directory", FIRST_STEPS, re.MULTILINE)[1]
    assert cli.main([*command.split(), "--engine", "serial", "--directory", str(tmp_path / "run")]) == 0
    start = re.match(r".* after \d+", PRINTED)[0]  # In thousands.
    assert f"\n{start}," in capsys.readouterr().out


def test_every_example_is_in_the_table():
    files = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".js")}
    assert files == set(re.findall(r"`(\w+\.(?:py|js))`", FIRST_STEPS.partition("## Examples")[2]))


def test_pages_hold_what_their_markers_make():
    assert markers.stale() == [], "make pages"


def test_links_of_the_documents_lead_somewhere():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#\s]+)", prose):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.relative_to(ROOT)} links to {link}"


def test_files_that_the_page_on_architecture_names_exist():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:agents|framework|launch)/[\w/.]*)`", page)
    assert len(named) >= 25 and [path for path in named if not (ROOT / path).exists()] == []
    classes = re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b", page.partition("## Inside the nodes")[2])
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "framework").rglob("*.py"))
    assert [name for name in set(classes) if f"class {name}" not in sources] == []
