"""Whole programs with every way of inference: the same experience, exact steps, no env mixed up."""

from __future__ import annotations

import dataclasses
import functools
from typing import get_args

import pytest
from helpers.small_programs import SMALL as SMALL_DQN

import launch
from agents.dqn import DQN
from agents.impala import IMPALA, IMPALAConfig
from agents.ppo import PPO, PPOConfig
from agents.r2d2 import R2D2, R2D2Config
from framework.checkpoints import Checkpointer
from framework.environments.testing import EchoEnvironment, FakeEnvironment
from framework.loggers import InMemoryLogger, read_jsonl, without_times
from framework.programs import RunConfig, make_program
from framework.runs.run_config import Inference

SMALL = dataclasses.replace(SMALL_DQN, samples_per_insert=2.0, n_step=1, epsilon_ladder=3.0)
NUM_ACTIONS, LENGTH = 4, 7
PATIENCE = 120.0


def echo(seed: int) -> EchoEnvironment:
    """Envs count from numbers far apart, so that every observation there is says whose it is."""
    return EchoEnvironment(NUM_ACTIONS, LENGTH, first=seed % 150 * 1000)  # rewards stay exact


class CheckedDQN(DQN):
    """Fails as soon as a batch holds a reward that is not that of its own observation and action."""

    def make_learner(self, networks, spec):
        learner = super().make_learner(networks, spec)
        step = learner.step

        def checked(batch):
            data = batch.data
            observation, action, after = data.observation[:, 0], data.action, data.next_observation[:, 0]
            assert (data.reward == 100 * observation + action).all(), "a reward of another step"
            assert (after == observation + 1).all(), "an observation of another env"
            return step(batch)

        learner.step = checked
        return learner


class FullDisk(InMemoryLogger):
    """Refuses the first row of an inference node."""

    def __init__(self, flag):
        super().__init__()
        self._flag = flag

    def write(self, row):
        if row["label"] == "inference" and not self._flag.exists():
            self._flag.touch()
            raise OSError("no space is left")
        super().write(row)


def program(mode, directory=None, **changes):
    settings = {"num_actors": 2, "envs_per_actor": 3, "max_env_steps": 600, "evaluate_period": None}
    settings |= {"log_period": 100, "learner_log_period": 10, "publish_period": 2, "update_period": 2}
    settings |= {"directory": directory, "inference": mode, **changes}
    agent = settings.pop("agent", None) or CheckedDQN(SMALL)
    factory, logger_factory = settings.pop("environment", echo), settings.pop("logger_factory", None)
    return make_program(agent, factory, RunConfig(**settings), logger_factory=logger_factory)


ENGINES = [("serial", mode) for mode in get_args(Inference)]
ENGINES += [("threads", "server"), ("processes", "alternating+server")]


@pytest.mark.parametrize(("engine", "mode"), ENGINES)
def test_exact_steps_and_no_env_mixed_up(engine, mode, tmp_path):
    result = launch.launch(program(mode, tmp_path), engine=engine)
    assert result["reason"] == "max_env_steps" and result["env_steps"] == 600
    rows = list(read_jsonl(tmp_path / "metrics.jsonl"))
    # The last row of each. On a busy machine one may have made all steps before the other has begun.
    actors = list({row["label"]: row for row in rows if row["label"].startswith("actor-")}.values())
    assert sum(row["steps"] for row in actors) == 600
    assert all(row["episode_length"] == LENGTH for row in actors if "episode_length" in row)
    counts = Checkpointer(tmp_path / "checkpoints").restore().state("counter")["counts"]
    # The program ends with the last report of steps, which holds their episodes.
    assert result["actor_episodes"] == counts["actor_episodes"] > 600 / (2 * LENGTH)
    served = [row for row in rows if row["label"] == "inference"]
    assert bool(served) == mode.endswith("server")
    if served:
        # Envs are acted for once in each step and once more at the end of each episode.
        assert served[-1]["steps"] >= 600 and 1 <= served[-1]["rows_per_batch"] <= 6
    if engine == "serial":
        assert counts["learner_steps"] > 20
        assert max(row["variables_version"] for row in actors) > 10
        resumed = launch.launch(program(mode, tmp_path, max_env_steps=900), "threads")
        assert resumed["env_steps"] == 900 and resumed["learner_steps"] > counts["learner_steps"]


def test_an_error_after_a_batch_is_a_failure_of_the_node(tmp_path):
    """Nobody calls the thread that runs the batches."""
    graph = program("server", logger_factory=functools.partial(FullDisk, tmp_path / "refused"))
    with pytest.raises(launch.NodeError, match="'inference-0' failed with OSError: no space") as error:
        launch.launch(graph, "threads")
    assert "in _count" in error.value.traceback
    (tmp_path / "refused").unlink()
    with launch.start(graph, "processes", restarts={"inference": 1, "actor": 9}) as job:
        assert job.wait(timeout=PATIENCE)["env_steps"] == 600
        restarts = {node["group"]: node["restarts"] for node in job.nodes()}
        assert restarts["inference"] == 1 and (tmp_path / "refused").exists()


def test_an_actor_with_a_server_of_its_own_is_one_with_the_policy_bit_by_bit(tmp_path):
    """On the serial engine the server makes the same choices, with parameters of the same age."""
    rows = {}
    for mode, nodes in (("local", 1), ("server", 2)):
        settings = {"seed": 5, "evaluate_period": 200, "num_evaluation_episodes": 2}
        launch.launch(program(mode, tmp_path / mode, **settings, inference_nodes=nodes), engine="serial")
        rows[mode] = [without_times(row) for row in read_jsonl(tmp_path / mode / "metrics.jsonl")]
        for row in rows[mode]:  # one names the parameters that acted last, the other those that act next
            if row["label"] != "evaluator":
                row.pop("variables_version", None)
                row.pop("acting_staleness", None)
    served = [row for row in rows["server"] if not row["label"].startswith("inference")]
    assert served == rows["local"] and len(served) > 10


def test_several_nodes_act_each_for_its_own_actors(tmp_path):
    settings = {"num_actors": 4, "envs_per_actor": 2, "inference_nodes": 2}
    graph = program("server", tmp_path, **settings)
    assert len(graph.groups["inference"]) == 2
    assert launch.launch(graph, engine="serial")["env_steps"] == 600
    steps = {row["label"]: row.get("steps", 0) for row in read_jsonl(tmp_path / "metrics.jsonl")}
    nodes = [steps.get(f"inference-{index}", 0) for index in range(2)]
    # Nodes act once more at the end of each episode, and ahead.
    for node, actors in zip(nodes, ((0, 2), (1, 3)), strict=True):
        assert node >= sum(steps.get(f"actor-{index}", 0) for index in actors)
    assert min(nodes) > 200


WRONG = [
    ({"mode": "remote"}, "inference: got 'remote'"),
    ({"mode": "alternating+server", "envs_per_actor": 1}, "envs_per_actor: got 1"),
    ({"mode": "local", "inference_nodes": 2}, "inference_nodes: got 2 with inference 'local'"),
    ({"inference_max_batch": 0}, "inference_max_batch: got 0"),
    ({"inference_nodes": 3}, "inference_nodes: got 3, expected a divisor"),
    ({"inference_device": "gpu"}, "inference_device: got 'gpu'"),
    ({"inference_timeout": -1.0}, r"inference_timeout: got -1.0.*at least 0"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        program(**{"mode": "server", **settings})


class OneVersion(PPO):
    """Fails for a batch of steps that were made with several versions of the parameters."""

    def make_learner(self, networks, spec):
        learner = super().make_learner(networks, spec)
        step, versions = learner.step, []

        def checked(batch):
            made_with = batch.data.extras["version"][batch.data.mask > 0].unique().tolist()
            assert len(made_with) == 1 and made_with > versions[-1:], "steps of several versions"
            versions.append(made_with[0])
            return step(batch)

        learner.step = checked
        return learner


def small_ppo(**changes):
    config = {"unroll_length": 5, "hidden_sizes": (8,), "epochs": 1, "minibatch_size": 16, **changes}
    return OneVersion(PPOConfig(**config))


IMPALA_CONFIG = IMPALAConfig(unroll_length=5, hidden_sizes=(8,), batch_size=4, lstm_size=4)
SEQUENCES = {"unroll_length": 5, "burn_in": 2, "period": 5, "min_replay_size": 8, "batch_size": 8}
SEQUENCES |= {"samples_per_insert": 2.0}
R2D2_CONFIG = R2D2Config(hidden_sizes=(8,), lstm_size=4, head_sizes=(8,), **SEQUENCES)
OTHER_AGENTS = {
    "ppo": (small_ppo(), "alternating+server", 1),
    "ppo, recurrent": (small_ppo(recurrent="lstm", recurrent_size=4), "server", 1),
    "impala, recurrent": (IMPALA(IMPALA_CONFIG), "alternating+server", 1),
    "r2d2": (R2D2(R2D2_CONFIG), "server", 2),
}


@pytest.mark.parametrize(("agent", "mode", "nodes"), OTHER_AGENTS.values(), ids=OTHER_AGENTS)
def test_other_agents(agent, mode, nodes):
    environment = functools.partial(FakeEnvironment, episode_length=LENGTH)
    graph = program(mode, agent=agent, environment=environment, inference_nodes=nodes)
    result = launch.launch(graph, engine="serial")
    assert result["reason"] == "max_env_steps" and result["env_steps"] == 600
    assert result["learner_steps"] > 10
