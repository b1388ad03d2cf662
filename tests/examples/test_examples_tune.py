"""Optuna's pruners end runs of the example."""

import functools
import pathlib
import runpy

import pytest

optuna = pytest.importorskip("optuna")
TUNE = runpy.run_path(str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "tune.py"))


@pytest.mark.parametrize(("lowest", "state", "evaluations"), [(0, "COMPLETE", 6), (501, "PRUNED", 1)])
def test_a_trial_ends_when_the_pruner_says_so(lowest, state, evaluations):
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=lowest))
    study.optimize(functools.partial(TUNE["objective"], max_env_steps=1_200), n_trials=1)
    (trial,) = study.trials
    assert trial.state.name == state and len(trial.intermediate_values) == evaluations
