"""Numbers of `info`, options of resets, and suites of entry points."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
from info_environment import SPACES, InfoEnvironment

import launch
from agents.random_actions import RandomActions
from framework import environments
from framework.commands import evaluate, listing
from framework.environments import ActionRepeat, BatchedEnvironment, EnvironmentFault, FrameStack
from framework.environments.testing import FakeEnvironment
from framework.programs import RunConfig, make_program
from framework.runs.trust import named


def steps(environment, count):
    yield environment.reset()
    for _ in range(count):
        yield environment.step(np.zeros(environment.num_envs, np.int64))


@pytest.mark.parametrize(
    ("stepping", "space"), [*(("inline", space) for space in SPACES), ("processes", "dict")]
)
def test_numbers_of_info_are_beside_the_observations(stepping, space):
    names = {"info_metrics": ("is_success", "distance")}
    make = functools.partial(
        environments.make, InfoEnvironment, num_envs=2, stepping=stepping, options={"space": space}
    )
    with make() as plain, make(**names) as environment:
        assert environment.spec == plain.spec
        seen = [{name: of.tolist() for name, of in environment.infos.items()} for _ in steps(environment, 4)]
    nan = pytest.approx([np.nan] * 2, nan_ok=True)
    assert [each["distance"] for each in seen] == [[3, 3], [2, 2], [1, 1], [0, 0], [3, 3]]
    # A new episode has none of the last one's.
    assert [each["is_success"] for each in seen] == [nan, nan, nan, [1, 1], nan]


def test_wrappers_leave_the_numbers_as_they_are():
    wrappers = [functools.partial(ActionRepeat, num_repeats=2), functools.partial(FrameStack, num_frames=2)]
    with environments.make(InfoEnvironment, info_metrics=("distance",), wrappers=wrappers) as environment:
        assert [environment.infos["distance"].item() for _ in steps(environment, 2)] == [3, 1, 0]
        assert environment.observation_spec().shape == (2, 2)


class Batch(environments.EnvironmentWrapper):
    @property
    def infos(self):
        return {"is_success": np.arange(self.num_envs)}


def make_batch(num_envs):
    return Batch(environments.make(InfoEnvironment, num_envs=num_envs))


WRONG = {
    "no infos": (
        {"environment": FakeEnvironment, "info_metrics": ("x",)},
        "got .*'x'.* for a FakeEnvironment",
    ),
    "other infos": ({"environment": make_batch, "info_metrics": ("x",)}, "got 'x', .* has is_success"),
    "options of dm_env": (
        {"environment": FakeEnvironment, "reset_options": {"a": 1}},
        "reset_options: got {'a': 1}",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_environments_without_them_are_refused(case):
    arguments, text = WRONG[case]
    with pytest.raises(ValueError, match=text):
        environments.make(**arguments)


def test_a_text_is_no_number():
    environment = environments.make(InfoEnvironment, info_metrics=("is_success",), options={"success": "yes"})
    with environment, pytest.raises(EnvironmentFault, match=re.escape("info with 'is_success' 'yes'")):
        list(steps(environment, 3))


def test_numbers_of_episodes_are_in_the_rows_of_training_and_of_evaluations(tmp_path, capsys, monkeypatch):
    config = RunConfig(
        directory=str(tmp_path / "run"),
        max_env_steps=60,
        evaluate_period=30,
        num_evaluation_episodes=5,
        log_period=10,
        info_metrics=("is_success",),
        reset_options={"goal": False},
        evaluation_envs=2,
    )
    rows = {}
    program = make_program(
        RandomActions(), InfoEnvironment, config, on_write=lambda snapshot: rows.update(snapshot["labels"])
    )
    result = launch.launch(program, "serial")
    assert result["episodes"] == 5 and result["is_success"] == 0.0 == rows["actor-0"]["is_success"]
    allow = (f"--allow={InfoEnvironment.__module__}",)
    found, usual = {}, evaluate.evaluate

    def evaluated(policy, episodes, envs, *others):
        found.update(usual(policy, episodes, envs, *others), envs=envs)
        return found

    monkeypatch.setattr(evaluate, "evaluate", evaluated)
    assert evaluate.main([config.directory, "--episodes", "3", *allow]) == 0
    assert "3 episodes with" in capsys.readouterr().out
    assert found["envs"] == 2 and found["mean_is_success"] == 0.0


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package that declares the suite `lab`, and one that cannot be imported."""
    folder = tmp_path / "lab-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    entries = (
        f"[repertory.environments]\nlab = {__name__}:make_lab\nlost = nowhere:make\natari = nowhere:make\n"
    )
    (folder / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(tmp_path)


def make_lab(name, num_envs, seed, size=1) -> BatchedEnvironment:
    assert name == "room:2"
    return environments.make(FakeEnvironment, num_envs=num_envs, seed=seed, options={"episode_length": size})


def test_a_suite_of_an_entry_point(installed):
    with environments.make("lab:room:2", num_envs=3, seed=1, options={"size": 4}) as environment:
        assert environment.num_envs == 3
        kinds = [timestep.step_type.tolist() for timestep in steps(environment, 4)]
        assert kinds[-1] == [2, 2, 2]
    assert not list(named({"environment": "lab:room:2"})) and "lab:NAME" in listing.text()
    result = launch.launch(make_program(RandomActions(), "lab:room:2", RunConfig(max_env_steps=20)), "serial")
    assert result["env_steps"] == 20
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'sze'.*Did you mean 'size'"):
        environments.make("lab:room:2", options={"sze": 4})
    with pytest.raises(ValueError, match="'lost:x': got the entry point 'lost', which cannot be imported"):
        environments.make("lost:x")
    with pytest.raises(ValueError, match="Did you mean 'lab'"):
        environments.make("labb:x")
    assert listing.text().count("  atari:NAME") == 1  # It is the suite of this package.
