"""Optuna's pruners end runs of the example."""

import functools
import pathlib
import runpy

import cloudpickle
import pytest

import launch as lp
from framework.runs.callbacks import OnWrite
from launch.engines.base import plan
from launch.engines.options import Options
from launch.engines.supervised import code

optuna = pytest.importorskip("optuna")
TUNE = runpy.run_path(str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "tune.py"))


@pytest.mark.parametrize(("lowest", "state", "evaluations"), [(0, "COMPLETE", 6), (501, "PRUNED", 1)])
def test_a_trial_ends_when_the_pruner_says_so(lowest, state, evaluations):
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=lowest))
    study.optimize(functools.partial(TUNE["objective"], max_env_steps=1_200), n_trials=1)
    (trial,) = study.trials
    assert trial.state.name == state and len(trial.intermediate_values) == evaluations


@pytest.mark.parametrize("callback", [TUNE["Prune"], lambda trial: OnWrite(lambda _: trial.should_prune())])
@pytest.mark.parametrize("database", [False, True])
def test_a_study_that_another_process_cannot_reach_is_refused(tmp_path, callback, database):
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db" if database else None)
    program = lp.Program("tune")
    program.add_node(lp.PyNode(print, callback(study.ask())), label="monitor")
    (unit,) = plan(program, "processes", Options())[1]
    if database:
        cloudpickle.loads(code.dumps(unit))
        return
    with pytest.raises(TypeError, match=r"node 'monitor-0' cannot be sent .* Give it a database"):
        code.dumps(unit)
