"""The settings of a sweep, its variants and its folder."""

import json

import pytest

from framework.experiments.sweep import Sweep, SweepFolder
from framework.runs import config_file
from framework.runs.run_lock import RunError

CARTPOLE = "gymnasium:CartPole-v1"


def sweep(**settings):
    return Sweep(**{"agents": "dqn", "environments": (CARTPOLE,), **settings})


def test_every_combination_with_every_seed():
    made = sweep(agents=("dqn", "ppo"), seeds=2, set={"discount": [0.9, 0.99], "engine": "serial"})
    variants = [each for group in made.groups() for each in group]
    assert [each.name for each in variants] == [
        f"{agent}-CartPole-v1-discount={discount}-seed{seed}"
        for agent in ("dqn", "ppo")
        for discount in (0.9, 0.99)
        for seed in (1, 2)
    ]
    assert variants[0].content() == {
        "agent": "dqn",
        "environment": CARTPOLE,
        "seed": 1,
        "discount": 0.9,
        "engine": "serial",
    }


def test_values_as_a_file_and_a_command_line_give_them():
    given = {
        "a-b": "1e-3,3e-4",
        "sizes": [[64], [64, 64]],
        "c": "None",
        "d": "1,None",
        "options": {"skip": [2, 4], "x": "on"},
    }
    made = sweep(set=given)
    values = {"a_b": (1e-3, 3e-4), "sizes": ([64], [64, 64]), "c": (None,), "d": (1, None)}
    assert made.set == {**values, "options.skip": (2, 4), "options.x": ("on",)}
    assert Sweep(**vars(made)).set == made.set  # As parsers of flags make it again.
    variant = next(iter(made.groups()))[0]
    assert variant.content()["options"] == {"skip": 2, "x": "on"}


def test_seeds_and_names_for_files():
    made = sweep(
        agents="my.lab:Agent", environments="ale:ALE/Pong-v5", seeds=[3, 0], set={"a": ["x/y", "x y"]}
    )
    names = [each.name for group in made.groups() for each in group]
    assert len({*names}) == 4 and all(
        "/" not in name and ":" not in name and " " not in name for name in names
    )
    assert [name.partition("seed")[2][:2] for name in names] == ["3-", "0-"] * 2  # Then a hash.
    (name,) = (each.name for group in sweep(set={"a": ["x" * 300]}).groups() for each in group)
    assert name == "dqn-CartPole-v1-seed1"
    long = sweep(set={"a": ["x" * 300, "y"]})
    assert max(len(each.name) for group in long.groups() for each in group) < 130


def test_the_folder_is_the_same_for_the_same_runs():
    place = sweep(set={"a": 1}).place
    assert place.startswith("sweeps/dqn-") and sweep(set={"a": 1}, slots=3, final_episodes=2).place == place
    assert len({place, sweep(set={"a": 2}).place, sweep(seeds=2).place, sweep(optuna=3).place}) == 4
    assert sweep(directory="here").place == "here"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"agents": ()}, "agents: got .., expected at least one"),
        ({"environments": ("a", "a")}, r"environments: got \['a', 'a'\], expected .* none twice"),
        ({"seeds": (1, 2, 1)}, "seeds: got .*none twice"),
        ({"set": {"a": []}}, "set: a: got .., expected at least one value"),
        ({"set": {"a": [1, 1]}}, "set: a: got .*none twice"),
        ({"set": {"seed": 3}}, "got 'seed', expected a setting of one run. Give seeds"),
        (
            {"set": {"a": 3}, "search": {"a": {"low": 0, "high": 1}}, "optuna": 2},
            "got 'a', which set has, too",
        ),
        ({"slots": 0}, "slots: got 0, expected at least 1"),
        ({"search": {"a": {"low": 0, "high": 1}}}, "search: got .* Give optuna"),
        ({"search": {"a": {"low": 1, "high": 1}}, "optuna": 2}, "search: a: got .*low < high"),
        ({"search": {"a": {"low": 0, "high": 1, "log": True}}, "optuna": 2}, "above 0 with log"),
        ({"search": {"a": {"low": 0, "hihg": 1}}, "optuna": 2}, "Did you mean 'high'"),
        ({"search": {"a": 3}, "optuna": 2}, "search: a: got 3, expected numbers such as"),
        ({"optuna": 2, "set": {"a": 1}}, "optuna: got 2, and nothing to choose"),
        ({"objective": "return_per_cpu_second"}, "objective: got .* Give optuna"),
        ({"slurm": {"timeout_min": 3}}, "Give executor: slurm"),
    ],
)
def test_wrong_settings(settings, text):
    with pytest.raises(ValueError, match=text):
        sweep(**settings).check()


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"executor": "pbs"}, ValueError, "executor: got 'pbs', expected one of 'local', 'slurm'"),
        ({"slot": 2}, TypeError, "Did you mean 'slots'"),
        ({"set": {"a": "[1,"}}, ValueError, r"set: a: got '\[1,'"),
    ],
)
def test_wrong_types(settings, error, text):
    with pytest.raises(error, match=text):
        sweep(**settings)


@pytest.fixture
def folder(tmp_path):
    made = SweepFolder(tmp_path / "sweep", sweep(set={"discount": [0.9]}))
    made.save()
    return made


def test_it_is_read_as_it_was_written(folder, tmp_path):
    folder.record("a", state="failed", error="why")
    again = SweepFolder(folder.path)
    assert again.sweep == folder.sweep and again.states == {"a": {"state": "failed", "error": "why"}}
    assert again.state("a") == "failed" and again.state("b") == "waiting"
    with pytest.raises(RunError, match=r"nothing is no sweep: it has no sweep\.yaml"):
        SweepFolder(tmp_path / "nothing")


def test_a_run_that_has_begun_keeps_its_settings(folder):
    (variant,) = next(iter(folder.sweep.groups()))
    other = next(iter(sweep(set={"discount": [0.5]}).groups()))
    folder.add([variant])
    folder.add(other)  # It has not begun.
    assert config_file.read(folder.file(variant.name))["discount"] == 0.5
    folder.run(variant.name).mkdir()
    folder.add(other)
    with pytest.raises(RunError, match=r"discount: got 0\.9, expected 0\.5.*Give another directory"):
        folder.add([variant])


def test_outcomes(folder, tmp_path):
    run = folder.run("a")
    run.mkdir()
    assert folder.outcome("a") is None
    (run / "result.json").write_text(json.dumps({"env_steps": 20, "reason": "max_learner_steps"}))
    assert folder.outcome("a") == {"env_steps": 20, "learner_steps": None, "episode_return": None}
    rows = [{"label": "evaluator", "episode_return": value, "learner_steps": 3} for value in (1.0, 2.5)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert folder.outcome("a") == {"env_steps": 20, "learner_steps": 3, "episode_return": 2.5}
    assert folder.state("a") == "finished"
    # A last evaluation with other seeds or episodes does not count.
    other = SweepFolder(folder.path, sweep(final_episodes=7))
    assert other.outcome("a") is None
    for episodes, expected in ((6, None), (7, 4.5)):
        last = {"seed": 1000, "episodes": episodes, "mean": 4.5}
        (run / "evaluation.json").write_text(json.dumps(last))
        assert (other.outcome("a") or {}).get("episode_return") == expected
    (run / "cpu_seconds.txt").write_text("1.5\n2.25\n")
    assert folder.cpu_seconds("a") == 3.75 and folder.cpu_seconds("b") == 0
