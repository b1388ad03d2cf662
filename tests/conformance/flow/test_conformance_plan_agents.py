"""Agents whose algorithm is a plan, in whole programs on every engine."""

from __future__ import annotations

import functools
import itertools
import os
import signal

import pytest
from engines import PROGRAM_ENGINES

import launch
from agents.a2c import A2C, A2CConfig
from agents.a3c import A3C
from agents.apex import ApeX, ApeXConfig
from agents.dqn import DQNConfig
from agents.impala import IMPALAConfig
from agents.maml import MAML, MAMLConfig
from agents.mbmpo import MBMPO, MBMPOConfig
from agents.ppo import PPOConfig
from examples.flows import DQNPlan, IMPALAPlan, PPOPlan
from framework.environments.tasks import Navigation2D
from framework.environments.testing import FakeEnvironment
from framework.flow import Flow
from framework.loggers import read_jsonl
from framework.programs import RunConfig, make_program

UNROLLS = {"unroll_length": 8, "hidden_sizes": (8,)}
ITEMS = {"min_replay_size": 50, "batch_size": 16, "samples_per_insert": 2.0}
IMAGINED = {"meta_steps": 2, "imagined_envs": 3, "horizon": 4}
OFF_POLICY = {**ITEMS, "insert_burst": 64, "hidden_sizes": (8,)}
AGENTS = {
    "a2c": A2C(A2CConfig(**UNROLLS)),
    "a2c_with_memory": A2C(A2CConfig(**UNROLLS, recurrent="lstm", recurrent_size=8)),
    "a3c": A3C(A2CConfig(**UNROLLS)),
    "apex": ApeX(ApeXConfig(**OFF_POLICY)),
    "dqn": DQNPlan(DQNConfig(**OFF_POLICY)),
    "impala": IMPALAPlan(IMPALAConfig(unroll_length=8, batch_size=6, hidden_sizes=(8,))),
    "ppo": PPOPlan(PPOConfig(**UNROLLS, epochs=2, minibatch_size=16)),
    # 4 steps before and 4 after the inner step.
    "maml": MAML(MAMLConfig(unroll_length=4, tasks_per_worker=1, evaluation_tasks=2, hidden_sizes=(8,))),
    # Each of two workers has one of two models.
    "mbmpo": MBMPO(MBMPOConfig(**UNROLLS, **IMAGINED, models=2, model_hidden_sizes=(8,), model_epochs=2)),
}
ASYNCHRONOUS = ("a3c", "apex", "dqn", "impala")
# A round of a synchronous plan is 2 * 3 * 8 env steps, some of them resets. 20 steps are left at the end.
PERIODS = {"evaluate_period": 500, "log_period": 50, "learner_log_period": 1}
COUNTS = {"num_actors": 2, "envs_per_actor": 3, "max_env_steps": 500, "num_evaluation_episodes": 2}
CONFIG = RunConfig(**COUNTS, **PERIODS, seed=3)


def program(agent, directory=None, episode_length=7, **changes):
    config = RunConfig(**{**vars(CONFIG), "directory": directory, **changes})
    environment = functools.partial(FakeEnvironment, episode_length=episode_length)
    if isinstance(agent, MAML):
        environment = functools.partial(Navigation2D, max_steps=4)
    return make_program(agent, environment, config)


def rows(directory, label):
    return [row for row in read_jsonl(directory / "metrics.jsonl") if row["label"] == label]


@functools.cache
def curve(agent, directory, engine):
    """What one seed learned and met, step by step, without what a clock decides. Checks the counts too."""
    directory = directory / agent / engine
    result = launch.launch(program(AGENTS[agent], directory), engine=engine)
    learner, (evaluation,) = rows(directory, "learner"), rows(directory, "evaluator")
    actors = [rows(directory, f"actor-{index}") for index in range(2)]
    assert (result["reason"], result["env_steps"]) == ("max_env_steps", 500)
    assert sum(actor[-1]["steps"] for actor in actors if actor) == 500
    assert len(learner) == result["learner_steps"] >= 8
    assert evaluation["variables_version"] == len(learner) or agent == "impala"  # Which looks ahead.
    learned = [
        {name: value for name, value in row.items() if not name.startswith(("time/", "acting_"))}
        for row in learner
    ]
    assert all("loss" in row or "models/loss" in row for row in learned)
    # The steps after the last round go to the worker that asks first.
    acted = [(row["label"], row["steps"], row.get("episode_return")) for actor in actors for row in actor]
    acted = [row for row in acted if row[1] < 200]
    assert any(episode_return is not None for _, _, episode_return in acted)
    assert len(acted) >= 6 or agent in ASYNCHRONOUS  # There, one worker may make most of the steps.
    return learned, acted, evaluation["episode_return"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("curves")


def agents_on_engines():
    """Every agent on `serial`; elsewhere a synchronous one and one with replay, the others at a release."""
    for agent in AGENTS:
        for engine in PROGRAM_ENGINES:
            is_release = engine != "serial" and agent not in ("a2c", "apex")
            yield pytest.param(agent, engine, marks=[pytest.mark.release] * is_release)


@pytest.mark.parametrize(("agent", "engine"), list(agents_on_engines()))
def test_a_plan_agent_makes_exactly_its_env_steps(request, directory, engine, agent):
    """And one seed gives one learning curve on every engine, if the plan is synchronous."""
    if engine == "ray":
        request.getfixturevalue("ray_cluster")
    one, serial = curve(agent, directory, engine), curve(agent, directory, "serial")
    assert one == serial or agent in ASYNCHRONOUS


def test_a_stop_ends_calls_in_progress(program_engine):
    settings = {"max_env_steps": None, "evaluate_period": None, "max_learner_steps": 5}
    result = launch.launch(program(AGENTS["a3c"], **settings), engine=program_engine)
    assert result == {"reason": "max_learner_steps", "learner_steps": 5}


class ThreeRounds(A2C):
    """Its plan ends by itself."""

    def plan(self, workers, learner):
        return Flow.of(itertools.islice(super().plan(workers, learner), 3))


def test_a_plan_that_ends_ends_the_program(program_engine):
    """With an evaluator, which waits for an evaluation that never comes."""
    agent = ThreeRounds(A2CConfig(**UNROLLS))
    result = launch.launch(program(agent, max_env_steps=None), engine=program_engine)
    assert result == {"reason": "plan_ended", "learner_steps": 3}


def run_and_kill(agent, labels, steps, engine, directory):
    """Kills nodes of a program, one after the other; checks that they and no others were restarted."""
    restarts = {label.partition("-")[0]: 1 for label in labels}
    made = program(AGENTS[agent], directory, max_env_steps=steps, evaluate_period=steps)
    with launch.start(made, engine, restarts=restarts, heartbeat_timeout=None) as job:
        counter = job.client("counter")
        for number, label in enumerate(labels, 1):
            assert counter.wait_for("learner_steps", 5 * number, timeout=240.0)
            (killed,) = [node for node in job.nodes() if node["label"] == label]
            os.kill(killed["pid"], signal.SIGKILL)
        result = job.wait(timeout=240.0)
        restarted = {node["label"]: node["restarts"] for node in job.nodes() if node["restarts"]}
    assert (result["reason"], result["env_steps"]) == ("max_env_steps", steps)
    assert restarted == dict.fromkeys(labels, 1)
    return result


def test_a_plan_goes_on_with_restarted_nodes(tmp_path):
    run_and_kill("a2c", ["actor-1", "learner-0"], 1_500, "processes", tmp_path)


@pytest.mark.real
@pytest.mark.timeout(400)
def test_a_program_whose_nodes_are_killed_goes_on_and_is_resumed(supervised_program_engine, tmp_path):
    """Ape-X: a plan, workers, replay, checkpoints. The whole program that `.ci/run` has on the real Ray."""
    first = run_and_kill("apex", ["actor-1", "replay-0"], 3_000, supervised_program_engine, tmp_path)
    again = program(AGENTS["apex"], tmp_path, max_env_steps=3_500, evaluate_period=3_000)
    second = launch.launch(again, supervised_program_engine, heartbeat_timeout=None)
    assert second["env_steps"] == 3_500
    assert second["learner_steps"] >= first["learner_steps"] + 8


WITHOUT_EFFECT = {"inference": "server", "variable_sources": 1, "replay_shards": 2, "num_learners": 2}
WITHOUT_EFFECT |= {"replay_backend": "reverb"}


@pytest.mark.parametrize(("field", "value"), WITHOUT_EFFECT.items())
def test_settings_without_effect_on_a_plan_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}: got {value!r}, expected "):
        program(AGENTS["a2c"], **{field: value})
