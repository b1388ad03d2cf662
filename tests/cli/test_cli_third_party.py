"""A package of somebody else: its agent and its environment by name, without touching the checkout."""

import os
import pathlib
import re
import shutil
import sys

import pytest
import warm_python

from framework.loggers import read_jsonl
from framework.programs import load_policy
from framework.runs import config_file

HERE = pathlib.Path(__file__).parent
ENVIRONMENT = "corridor_lab:Corridor"
ALLOW = ("--allow", "corridor_lab")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that the package is installed in, with its metadata as pip would write it."""
    target = tmp_path_factory.mktemp("site-packages")
    shutil.copy(HERE / "third_party" / "corridor_lab.py", target)
    (target / "corridor_lab-1.0.dist-info").mkdir()
    project = (HERE / "third_party" / "pyproject.toml").read_text(encoding="utf-8")
    (group,) = re.findall(r'\[project\.entry-points\."(.+)"\]', project)
    (entry,) = re.findall(r'^(\w+) = "(corridor_lab:\w+)"$', project, re.MULTILINE)
    (target / "corridor_lab-1.0.dist-info" / "METADATA").write_text("Name: corridor-lab\nVersion: 1.0\n")
    text = f"[{group}]\n{' = '.join(entry)}\n"
    (target / "corridor_lab-1.0.dist-info" / "entry_points.txt").write_text(text)
    return target


def commands(installed, folder, *lines):
    """What the commands print, in a process that begins in ``folder``."""
    code = "import sys; from framework.commands.cli import main\n"
    code += "".join(f"assert main({list(map(str, line))!r}) == 0\n" for line in lines)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    options = {"capture_output": True, "text": True, "timeout": 100}
    done = warm_python.run(["-c", code], cwd=folder, env=environment, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_evaluate_resume_film(installed, tmp_path):
    run = tmp_path / "run"
    # Its nodes are processes of their own, and find the package too.
    where = ("--environment", ENVIRONMENT, "--engine", "processes", "--directory", run)
    small = ("--num-actors", 1, "--num-evaluation-episodes", 2, "--max-env-steps", 300)
    commands(installed, tmp_path, ("train", "careful-dqn", *where, *small))
    settings = config_file.read(run / "config.yaml")
    assert settings["agent"] == "careful_dqn" and settings["environment"] == ENVIRONMENT
    assert settings["care"] == 0.25  # its preset's
    out = commands(
        installed,
        tmp_path,
        ("eval", run, "--episodes", 3, *ALLOW),
        ("train", "--resume", run, "--max-env-steps", 400, "--engine", "serial", *ALLOW),
        ("video", run, "--output", tmp_path / "film.gif", "--max-steps", 5, *ALLOW),
        ("list",),
    )
    for text in ("3 episodes", "400 env steps is spent", "pictures in", "careful_dqn"):
        assert text in out
    assert (tmp_path / "film.gif").exists()


@pytest.fixture
def importable(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    yield
    sys.modules.pop("corridor_lab", None)


@pytest.mark.parametrize(
    "agent, recorded, flags, sizes",
    [
        ("corridor_lab:CarefulDQN", "careful_dqn", ["--care", "0.1"], [16]),
        ("corridor_lab:make_small", "corridor_lab:make_small", ["--care", "0.1"], [8]),
        ("corridor_lab:make_fixed", "corridor_lab:make_fixed", [], [4]),
    ],
)
def test_agents_by_module_and_object(importable, repertory, tmp_path, agent, recorded, flags, sizes):
    run = tmp_path / "run"
    flags += ["--environment", ENVIRONMENT, "--engine", "serial", "--max-env-steps", "150"]
    code, out, err = repertory("train", agent, *flags, "--num-evaluation-episodes", "2", "--directory", run)
    assert code == 0, err
    assert f"repertory eval {run} --allow corridor_lab" in out
    settings = config_file.read(run / "config.yaml")
    assert settings["agent"] == recorded and settings.get("care") == (0.1 if "--care" in flags else None)
    assert list(load_policy(run, allow=ALLOW[1:]).agent.config.hidden_sizes) == sizes
    code, _, err = repertory("train", "--resume", run, "--max-env-steps", "200")
    assert code == 1 and "add --allow corridor_lab" in err
    further = ["--max-env-steps", "200", "--engine", "threads"]
    code, _, err = repertory("train", "--resume", run, *further, *ALLOW)
    assert code == 0, err
    assert any(row.get("env_steps") == 200 for row in read_jsonl(run / "metrics.jsonl"))


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["nowhere:Agent"], "'nowhere:Agent', which cannot be imported: No module named 'nowhere'"),
        (["corridor_lab:Agent"], "has no attribute 'Agent'"),
        (["corridor_lab:PRESETS"], "expected an agent's class, or a function"),
        (["corridor_lab:Corridor"], "expected a core.Agent"),
        (["dqn", "--environment", "corridor_lab:Corridr"], "has no attribute 'Corridr'"),
        (["dqn", "--environment", "corridor_lab:PRESETS"], "is dict, expected a class or a function"),
        (["dqn", "--environment", "gymnasim:X"], "No module named 'gymnasim'. Did you mean 'gymnasium'?"),
    ],
)
def test_wrong_names(importable, repertory, arguments, error):
    code, _, err = repertory("train", *arguments)
    assert code == 2 and error in err
