"""`repertory record`: episodes of a run's policies and of random actions, in a folder."""

import json

import numpy as np
import pytest
from helpers import fresh_runs

import launch
from agents.dqn import DQN, DQNConfig
from framework.commands import record
from framework.datasets import read_episodes
from framework.programs import RunConfig, make_program

CARTPOLE = "gymnasium:CartPole-v1"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose policy always does the same, as long as its parameters are new."""
    return fresh_runs.make(tmp_path_factory.mktemp("runs") / "dqn", DQN(DQNConfig(hidden_sizes=(8,)))).path


def test_the_latest_policy_with_and_without_noise(repertory, run, tmp_path):
    taken = {}
    for noise in (0, 0.5):
        path = tmp_path / f"noise-{noise}"
        flags = ("--policy", "latest", "--noise", noise, "--episodes", 4, "--output", path)
        code, out, err = repertory("record", run, *flags)
        assert (code, err) == (0, "") and "4 episodes" in out
        episodes = read_episodes(path)
        assert (
            len(episodes) == 4 and episodes.about["noise"] == noise and episodes.about["source"] == str(run)
        )
        taken[noise] = np.concatenate([each.action[:-1] for each in episodes])
        assert episodes.spec.actions.num_values == 2
    greedy = [len(set(each.tolist())) for each in (taken[0], taken[0.5])]
    assert greedy[1] == 2 and abs(taken[0.5].mean() - 0.5) < 0.35


def test_mixed_episodes_are_of_each_policy_in_turns(repertory, run, tmp_path, monkeypatch):
    asked = []
    load = record.load_policy
    monkeypatch.setattr(
        record, "load_policy", lambda path, name, allow: asked.append(name) or load(path, None)
    )
    acted = []
    acting = record._Acting.__call__
    monkeypatch.setattr(
        record._Acting, "__call__", lambda self, seen: acted.append(self._noise) or acting(self, seen)
    )
    code, _, err = repertory(
        "record", run, "--policy", "mixed", "--episodes", 3, "--output", tmp_path / "data"
    )
    assert (code, err, asked) == (0, "", ["best", "latest"])
    lengths = read_episodes(tmp_path / "data").lengths
    assert acted == [0.0] * int(lengths[0] + lengths[1]) + [1.0] * int(lengths[2])


def test_random_actions_in_an_environment(repertory, tmp_path):
    flags = ("--policy", "random", "--episodes", 5, "--output", tmp_path / "data")
    assert repertory("record", CARTPOLE, *flags)[0] == 0
    actions = np.concatenate([each.action for each in read_episodes(tmp_path / "data")])
    assert 0.2 < actions.mean() < 0.8


def test_the_replay_of_a_run_is_what_its_actors_did(repertory, tmp_path):
    agent = DQN(DQNConfig(hidden_sizes=(8,), n_step=1, min_replay_size=50))
    config = RunConfig(directory=str(tmp_path / "run"), max_env_steps=200, envs_per_actor=2)
    launch.launch(make_program(agent, CARTPOLE, config))
    flags = ("--policy", "replay", "--output")
    code, out, err = repertory("record", tmp_path / "run", *flags, tmp_path / "data")
    assert (code, err) == (0, "") and "200 steps" in out
    episodes = read_episodes(tmp_path / "data")
    ended = [each.discount[-2] == 0 for each in episodes]
    assert episodes.about["algorithm_name"] == "replay" and ended.count(False) <= 2  # Those that were open.
    assert episodes.spec.actions.num_values == 2
    code = repertory("record", tmp_path / "run", *flags, tmp_path / "one", "--episodes", 1)[0]
    assert code == 0 and len(read_episodes(tmp_path / "one")) == 1


def test_wrong_arguments(repertory, run, tmp_path):
    (tmp_path / "old").mkdir()
    for flags, text in (
        ((run, "--output", tmp_path / "old"), "exists. Give a new folder"),
        ((CARTPOLE, "--output", tmp_path / "new"), "holds no run"),
        ((run, "--output", tmp_path / "new", "--noise", 2), "--noise: got 2.0"),
        ((run, "--output", tmp_path / "new", "--policy", "best"), "best parameters"),
        ((run, "--output", tmp_path / "new", "--policy", "replay"), "has no part 'replay'"),
        ((run, "--output", tmp_path / "new", "--policy", "replay", "--noise", 0.5), "expected 0"),
        ((run, "--output", tmp_path / "new", "--compress", "--layout", "minari"), "expected npz"),
    ):
        code, _, err = repertory("record", *flags)
        assert code in (1, 2) and text in err, err
    assert not (tmp_path / "new").exists()


def test_the_return_of_a_policy_is_estimated_from_episodes(repertory, run, tmp_path):
    data = tmp_path / "data"
    assert repertory("record", run, "--policy", "latest", "--episodes", 3, "--output", data)[0] == 0
    code, out, err = repertory("eval", run, "--dataset", data, "--learner-steps", 5)
    assert (code, err) == (0, "") and "Fitted Q evaluation with" in out and "3 episodes" in out
    result = json.loads((run / "off_policy_evaluation.json").read_text())
    lengths = read_episodes(data).lengths
    expected = np.mean([(1 - 0.99**n) / 0.01 for n in lengths])  # Each step pays 1.
    assert result["data_return"] == pytest.approx(expected) and result["learner_steps"] == 5
    assert result["transitions"] == lengths.sum() and result["dataset"] == str(data)
    code, _, err = repertory("eval", run, "--dataset", tmp_path / "nothing")
    assert code == 1 and "nothing" in err and "Traceback" not in err
