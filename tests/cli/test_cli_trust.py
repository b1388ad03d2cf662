"""What the settings of a run may name without being told."""

import subprocess
import sys

import pytest

from framework.programs import load_policy
from framework.runs import config_file, trust
from framework.runs.run_folder import RunError

HERE = __name__
getoutput = subprocess.getoutput


def own(**arguments):
    return arguments


@pytest.mark.parametrize(
    "settings",
    [
        {"agent": "dqn", "environment": "gymnasium:CartPole-v1", "device": "cuda:0", "networks_fn": None},
        {"environment": "pettingzoo:mpe.simple_spread_v3", "demonstrations": "C:/episodes.npz"},
        {"environment": "remote:tcp://127.0.0.1:5555", "environment_options": {"key": "/runs/a/key"}},
        {
            "wrappers": ["StepLimit(limit=9)"],
            "observers": ["ActionObserver"],
            "loggers": ["wandb(mode='a:b')"],
        },
        {"resources": {"actor": {"env": {"CUDA_VISIBLE_DEVICES": "0"}}}},
    ],
)
def test_registered_names(settings):
    trust.check(settings, ())


@pytest.mark.parametrize(
    "setting, value, module",
    [
        ("agent", "unknown_lab:make", "unknown_lab"),
        ("agent", "\u00e9:make", "\u00e9"),
        ("environment", "subprocess:getoutput", "subprocess"),
        ("environment", "gymnasium:unknown_lab.envs:Maze-v0", "unknown_lab.envs"),
        ("environment", "pettingzoo:unknown_lab", "unknown_lab"),
        ("networks_fn", "unknown_lab", "unknown_lab"),
        ("wrappers", ["StepLimit", "unknown_lab:Noise(scale=1)"], "unknown_lab"),
        ("observers", ("unknown_lab:Observer",), "unknown_lab"),
        ("loggers", ["unknown_lab:Logger"], "unknown_lab"),
        ("loggers", ["wandb(settings={'x_executable': '/tmp/a'})"], "wandb"),
        ("demonstrations", "unknown_lab:episodes", "unknown_lab"),
        ("environment_options", {"make": {"env_id": "unknown_lab:Maze-v0"}}, "unknown_lab"),
        ("resources", {"actor": {"env": {"LD_PRELOAD": "/tmp/a.so"}}}, "env.LD_PRELOAD"),
    ],
)
def test_other_names_are_refused_before_anything_is_imported(setting, value, module):
    with pytest.raises(ValueError, match=f"{setting}.*add --allow {module};.*allow=\\('{module}',\\)"):
        trust.check({setting: value}, ("another", module[:-1]))
    assert "unknown_lab" not in sys.modules
    trust.check({setting: value}, (module.partition(".")[0], "subprocess"))


@pytest.mark.parametrize("name", ["own", "getoutput", "subprocess", "subprocess.getoutput", "sys.modules"])
def test_a_module_allows_what_is_defined_in_it(name):
    if name == "own":
        trust.check({"environment": f"{HERE}:{name}"}, (HERE,))
        return
    with pytest.raises(
        ValueError, match=f"--allow {name.partition('.')[0].replace('getoutput', 'subprocess')}"
    ):
        trust.check({"environment": f"{HERE}:{name}"}, (HERE,))


def test_every_command_asks(make_run, repertory, tmp_path):
    run = make_run(steps=[10])
    settings = config_file.read(run.path / "config.yaml")
    settings["environment_options"] = {"cmd": f"touch {tmp_path}/ran"}
    config_file.write(run.path / "config.yaml", {**settings, "environment": "subprocess:getoutput"})
    for line in (
        ["eval", run.path],
        ["video", run.path],
        ["train", "--resume", run.path],
        ["train", "--resume", run.path, "--seed", "1"],
        ["train", "--config", run.path / "config.yaml"],
    ):
        code, _, err = repertory(*line)
        assert code and "'subprocess:getoutput'" in err and "--allow subprocess" in err
    with pytest.raises(RunError, match="subprocess"):
        load_policy(run.path)
    assert not (tmp_path / "ran").exists()
