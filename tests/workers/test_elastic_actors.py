"""Elastic actors: a program goes on with those that are there, and lost ones come back."""

import json
import os
import signal
import time
from concurrent.futures import Future

import pytest

import launch
from agents.dqn import DQN, DQNConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.ppo import PPO, PPOConfig
from examples.flows import PPOPlan
from framework import environments, specs
from framework.learners.roster import Roster
from framework.programs import RunConfig, make_program
from framework.replay import EmbeddedClient
from framework.runs.services import Counter
from framework.variables import VariableBlock
from framework.workers import actor_worker
from framework.workers.actor_worker import ActorWorker
from framework.workers.worker import Setup
from launch.handles import NodeClient

PATIENCE = 100.0
ACTORS, ENVS = 3, 2

AGENTS = {
    "dqn": lambda: DQN(DQNConfig(min_replay_size=50, batch_size=16, samples_per_insert=1.0)),
    "ppo": lambda: PPO(PPOConfig(unroll_length=8, epochs=1)),
    "impala": lambda: IMPALA(IMPALAConfig(unroll_length=8, batch_size=4)),
}


def kill_actor(job, index):
    (pid,) = [node["pid"] for node in job.nodes() if node["label"] == f"actor-{index}"]
    os.kill(pid, signal.SIGKILL)


def make(agent, **options):
    settings = {"num_actors": ACTORS, "min_actors": 1, "envs_per_actor": ENVS, "learner_log_period": 1}
    config = RunConfig(evaluate_period=None, **settings, **options)
    return make_program(AGENTS[agent](), "gymnasium:CartPole-v1", config)


def new_learner(agent, spec):
    return agent.make_learner(agent.make_networks(spec), spec)


def test_an_actor_does_not_wait_forever_for_a_source_that_is_lost(monkeypatch):
    monkeypatch.setattr(actor_worker, "is_elastic", lambda config: True)
    environment, agent = environments.make("gymnasium:CartPole-v1"), AGENTS["ppo"]().for_program(2, 1, 0)
    spec = specs.make_environment_spec(environment)
    block = VariableBlock(new_learner(agent, spec).parameters())
    block.publish(0, new_learner(agent, spec).parameters())

    def call(name, args, kwargs, timeout):
        if name == "wait_for_version":
            assert timeout is not None, "It waits without a limit."
            raise launch.CallTimeout("The host of the source is lost.")
        return {"join": 0, "variable_block": block}[name]

    def submit(*called):
        future = Future()
        future.set_result(call(*called))
        return future

    config = RunConfig(num_actors=2, min_actors=1)
    setup = Setup(agent, lambda num_envs, seed: environment, spec, config)
    client = EmbeddedClient(agent.make_tables(spec), concurrent=False)
    source = NodeClient(0, call, submit)
    worker = ActorWorker(setup, replay=client, learner=source, counter=None, monitor=None)
    with pytest.raises(launch.CallTimeout):
        worker.step()


def test_a_program_goes_on_without_lost_actors_and_makes_all_its_steps(tmp_path):
    steps = 3_500  # Not over before the actor is killed.
    program = make("dqn", directory=str(tmp_path), max_env_steps=steps)
    with launch.start(program, "processes") as job:
        counter = job.client("counter").with_timeout(PATIENCE)
        assert counter.wait_for("env_steps", 300, PATIENCE)
        kill_actor(job, 1)
        result = job.wait(timeout=PATIENCE)
    assert (result["reason"], result["env_steps"]) == ("max_env_steps", steps)
    assert {node["label"] for node in job.nodes() if node["restarts"]} == {"actor-1"}
    assert not actors_of_batches(tmp_path)  # a batch waits for no actor


def actors_of_batches(directory):
    """By row of the learner, the number of actors in its batch."""
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row["actors"] for row in rows if row["label"] == "learner" and "actors" in row]


def test_batches_are_made_of_the_actors_that_are_there(tmp_path):
    program = make("ppo", directory=str(tmp_path), max_env_steps=10_000_000, variable_sources=1)
    with launch.start(program, "processes") as job:
        counter, deadline = job.client("counter").with_timeout(PATIENCE), time.monotonic() + PATIENCE

        def until(holds):
            while not holds(actors := actors_of_batches(tmp_path)):
                assert time.monotonic() < deadline, actors
                steps = counter.get_counts().get("env_steps", 0)
                assert counter.wait_for("env_steps", steps + 100, PATIENCE)
            return len(actors)

        assert counter.wait_for("env_steps", 100, PATIENCE)
        before = until(lambda actors: 3 in actors)
        kill_actor(job, 1)
        after = until(lambda actors: 2 in actors[before:])
        until(lambda actors: 3 in actors[after:])
        job.stop()
        job.wait(timeout=PATIENCE)
    assert {*actors_of_batches(tmp_path)} <= {1, 2, 3}
    assert {node["label"] for node in job.nodes() if node["restarts"]} == {"actor-1"}


def test_a_roster_waits_for_the_actors_that_are_there():
    roster = Roster(least=2)
    roster.join("a", 5, "a")
    roster.report("a", 6, "a")
    assert not roster.is_complete(5)  # too few
    roster.join("b", 5, "b")
    assert not roster.is_complete(5)
    roster.join("c", 6, "c")  # during the step that makes version 6
    assert not roster.is_complete(5)
    roster.report("b", 6, "b")
    assert roster.is_complete(5) and not roster.is_complete(6)
    roster.report("a", 7, "a")
    roster.report("c", 7, "c")
    assert not roster.is_complete(6)
    roster.lose("b")
    roster.lose("unknown")
    assert roster.is_complete(6) and len(roster) == 2
    roster.report("b", 6, "b")  # arrives after the loss
    assert len(roster) == 2
    roster.join("b", 7, "b again")
    roster.report("b", 6, "b")
    assert roster.is_complete(6) and len(roster) == 3
    restarted = Roster(least=1)  # its actors report and do not join
    restarted.report("a", 7, "a")
    assert restarted.is_complete(6)


def test_a_lost_life_gets_no_new_grant():
    counter = Counter(max_steps=100)
    assert counter.grant("a", 60, life="1") == 60
    counter.release("a")
    assert counter.grant("a", 60, spent=10, life="1") == 0 and counter.ungranted() == 90
    assert counter.grant("a", 80, life="2") == 80
    assert counter.grant("a", 60, spent=60, life="1") == 0  # Late: 10 of its steps have room.
    assert counter.grant("a", 0, spent=80, life="2") == 0 and counter.get_counts()["env_steps"] == 100


def test_the_grant_of_a_lost_actor_returns_to_the_budget():
    counter = Counter(max_steps=100)
    assert counter.grant("a", 60) == 60
    assert counter.grant("b", 60) == 40
    assert counter.grant("b", 60, spent=40) == 0 and counter.wait_for_steps(0.0)
    counter.release("a")
    counter.release("a")
    assert counter.grant("b", 60) == 60
    # A report of the one that was lost, after all: there are no steps left that others do not hold.
    assert counter.grant("a", 60, spent=60) == 0 and counter.get_counts()["env_steps"] == 40
    with pytest.raises(ValueError, match="holds a grant of 0"):
        counter.grant("a", 60, spent=1)
    assert counter.grant("b", 0, spent=60) == 0 and not counter.wait_for_steps(0.0)


def test_actors_that_hold_their_last_steps_do_not_wait_for_one_another():
    counter = Counter(max_steps=10)
    a, b = ({"life": life, "holds": True} for life in "12")
    assert counter.grant("a", 6, **a) == 6 and counter.grant("b", 6, **b) == 4
    assert counter.grant("a", 6, spent=6, **a) == 0 and counter.wait_for_steps(0.0)  # b may be lost.
    assert counter.grant("b", 6, spent=4, **b) == 0 and not counter.wait_for_steps(0.0)
    assert counter.remaining() == 10
    assert counter.grant("a", 0, spent=6, life="1") == 0 and counter.remaining() == 4
    counter.release("b")  # It is lost when a has ended.
    assert counter.remaining() == 0


def test_min_actors_is_for_programs_that_can_go_on_without_actors():
    with pytest.raises(ValueError, match="min_actors: got 3, expected at most num_actors"):
        RunConfig(num_actors=2, min_actors=3)
    config = RunConfig(num_actors=2, min_actors=1, num_learners=2)
    with pytest.raises(ValueError, match="min_actors: got 1 with num_learners 2, expected None"):
        make_program(AGENTS["ppo"](), "gymnasium:CartPole-v1", config)
    with pytest.raises(ValueError, match="min_actors: got 1 with max_policy_lag 1, expected None"):
        lagging = PPO(PPOConfig(unroll_length=8, max_policy_lag=1))
        make_program(lagging, "gymnasium:CartPole-v1", RunConfig(num_actors=2, min_actors=1))
    with pytest.raises(ValueError, match="min_actors: got 1, expected None for PPOPlan"):  # A plan.
        make_program(PPOPlan(), "gymnasium:CartPole-v1", RunConfig(num_actors=2, min_actors=1))
    assert make_program(AGENTS["impala"](), "gymnasium:CartPole-v1", config).min_nodes == {"actor": 1}
    config = RunConfig(num_actors=2, min_actors=2, variable_sources=2)
    program = make_program(AGENTS["ppo"](), "gymnasium:CartPole-v1", config)
    assert program.min_nodes == {"actor": 2, "variable_source": 1}
