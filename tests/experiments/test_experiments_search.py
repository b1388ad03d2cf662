"""Trials of Optuna in the folder of a sweep, with runs that the tests write."""

import json

import pytest

from framework.commands import building
from framework.experiments.search import Search, score
from framework.experiments.sweep import Sweep, SweepFolder
from framework.programs import RunConfig, make_agent
from framework.runs.run_folder import RunFolder
from framework.runs.run_lock import RunError

optuna = pytest.importorskip("optuna")

SETTINGS = {
    "agents": "dqn",
    "environments": "gymnasium:CartPole-v1",
    "set": {"n_step": [1, 3], "hidden_sizes": [[8], [8, 8]], "max_env_steps": 1000},
    "search": {
        "learning_rate": {"low": 1e-5, "high": 1e-1, "log": True},
        "batch_size": {"low": 2, "high": 64},
    },
    "optuna": 4,
}


@pytest.fixture
def search(tmp_path):
    """Opens the studies of the sweep, as each start of it does."""

    def opened(**settings):
        folder = SweepFolder(tmp_path, Sweep(**{**SETTINGS, **settings}))
        folder.save()
        return Search(folder)

    return opened


def write_config(trial):
    """Writes the settings of the run, with evaluations after each 100 env steps."""
    directory = str(trial.folder.run(trial.variants[0].name))
    config = RunConfig(max_env_steps=1000, directory=directory, evaluate_period=100)
    agent, environment = make_agent("random_actions"), "gymnasium:CartPole-v1"
    spec = building.environment_spec(agent, environment, config)
    RunFolder.describe(agent, environment, config, spec).save()


def finish(trial, value, cpu_seconds="10"):
    for variant in trial.variants:
        run = trial.folder.run(variant.name)
        run.mkdir()
        (run / "result.json").write_text(json.dumps({"episode_return": value}))
        (run / "cpu_seconds.txt").write_text(cpu_seconds)


def test_trials_choose_from_ranges_and_values(search):
    made = search(seeds=2)
    trials = list(made.trials())
    assert len(trials) == 4
    for number, trial in enumerate(trials):
        names = [variant.name for variant in trial.variants]
        assert names == [f"dqn-CartPole-v1-trial{number}-seed{seed}" for seed in (1, 2)]
        settings = trial.variants[0].settings
        assert settings == trial.variants[1].settings and settings["max_env_steps"] == 1000
        assert 1e-5 <= settings["learning_rate"] <= 1e-1 and settings["n_step"] in (1, 3)
        assert settings["hidden_sizes"] in ([8], [8, 8]) and isinstance(settings["batch_size"], int)
        assert trial.folder.file(names[0]).exists()
    assert len({trial.variants[0].settings["learning_rate"] for trial in trials}) == 4


@pytest.mark.parametrize(("objective", "best"), [("return", 1), ("return_per_cpu_second", 0)])
def test_a_search_goes_on_where_it_was(search, objective, best):
    first, second, third, _ = search(objective=objective).trials()
    finish(first, 3.0)
    finish(second, 4.0, "10\n20")
    first.end(["finished"])
    second.end(["finished"])
    third.end(["failed"])  # It stays open.
    again = search(objective=objective)
    left = list(again.trials())
    assert [trial.variants for trial in left] == [third.variants, _.variants]
    assert len(again.variants()) == 4 and again.variants()[:2] == [*first.variants, *second.variants]
    (line,) = again.best()
    assert line.startswith(f"Best of dqn in gymnasium:CartPole-v1: trial {best}, learning_rate=")
    assert [trial.trial.number for trial in search(objective=objective, optuna=6).trials()] == [2, 3, 4, 5]


def test_new_trials_of_a_search_that_goes_on_are_new(search):
    rates = {v.settings["learning_rate"] for each in (4, 8) for v in _variants(search(optuna=each))}
    assert len(rates) == 8


def _variants(made):
    list(made.trials())
    return made.variants()


def test_an_unpromising_run_ends(search):
    made = search(optuna=8)
    trials = made.trials()
    for _ in range(5):  # Until the median means something.
        trial = next(trials)
        finish(trial, 10.0)
        write_config(trial)
        assert not trial.prunes(trial.variants[0], {"env_steps": 105, "episode_return": 10.0}, None)
        assert not trial.prunes(trial.variants[0], {"env_steps": 220, "episode_return": 10.0}, None)
        trial.end(["finished"])
    worse, better = next(trials), next(trials)
    for trial, value in ((worse, 9.0), (better, 11.0)):
        trial.folder.run(trial.variants[0].name).mkdir()
        write_config(trial)
        # Not at the same step as the others, but in the same period.
        ended = trial.prunes(trial.variants[0], {"env_steps": 190, "episode_return": value}, None)
        assert ended == (trial is worse)
        # A run that goes on repeats rows.
        assert not trial.prunes(trial.variants[0], {"env_steps": 190, "episode_return": -1.0}, None)
    worse.end(["pruned"])
    states = [each.state.name for each in made.studies["dqn", "gymnasium:CartPole-v1"].trials]
    assert states == ["COMPLETE"] * 5 + ["PRUNED", "RUNNING"]
    # What was reported before is known in the next start.
    (again, *_) = search(optuna=8).trials()
    assert not again.prunes(again.variants[0], {"env_steps": 190, "episode_return": -1.0}, None)


def test_runs_elsewhere_are_not_compared_by_cpu_seconds(search):
    trial = next(search(objective="return_per_cpu_second").trials())
    assert not trial.prunes(trial.variants[0], {"env_steps": 100, "episode_return": 1.0}, None)


def test_fewer_cpu_seconds_are_better_for_any_return():
    assert score(10.0, None) == 10.0
    assert score(10.0, 2.0) > score(10.0, 4.0) > score(0.0, 4.0) > score(-10.0, 2.0) > score(-10.0, 4.0)


def test_a_run_without_an_evaluation_says_what_to_set(search):
    trial = next(search().trials())
    finish(trial, None)
    with pytest.raises(RunError, match=r"has no evaluation\. Set evaluate_period, or final_episodes"):
        trial.end(["finished"])
