"""Agents that draw their own graph: nodes that are added, replaced and left out."""

from __future__ import annotations

import dataclasses
import json

import pytest

import launch
from agents.dqn import DQN, DQNConfig
from agents.random_actions import RandomActions
from framework.checkpoints import Checkpointer
from framework.environments import testing
from framework.programs import RunConfig, groups, load_policy, make, make_program
from framework.runs.checkpoints import RunCheckpointer
from framework.runs.run_folder import RunError
from framework.runs.services import Counter

CARTPOLE = "gymnasium:CartPole-v1"
CONFIG = DQNConfig(min_replay_size=100, batch_size=16, samples_per_insert=4.0)


def test_the_default_graph():
    program = make_program(DQN(CONFIG), CARTPOLE, RunConfig(num_actors=2, inference="server"))
    made = {"replay": 1, "counter": 1, "monitor": 1, "learner": 1, "inference": 1, "actor": 2, "evaluator": 1}
    assert [(name, len(nodes)) for name, nodes in program.groups.items()] == list(made.items())
    seeds = [
        node._kwargs["seed"] for name in ("learner", "actor", "evaluator") for node in program.groups[name]
    ]
    assert len({*seeds}) == 4, "actors with one seed would make the same steps"


def test_workers_are_spread_over_the_nodes_that_serve_them():
    handles = [launch.CourierNode(object).create_handle() for _ in range(3)]
    group = launch.HandleGroup(handles, groups.connect_one)
    for index in range(6):
        assert groups.member(group, index) is handles[index % 3]
        assert list(groups.nearest(group, index).members()) == handles[index % 3 :] + handles[: index % 3]


class Two(DQN):
    """Two learners with different discounts on two replays, each with its actors and its evaluator."""

    def build(self, graph):
        short = DQN(dataclasses.replace(self.config, discount=0.5))
        for suffix, agent in (("", None), ("_short", short)):
            replay = graph.add_replay(agent=agent, name="replay" + suffix)
            learner = graph.add_learner(replay, agent=agent, name="learner" + suffix)
            variables = graph.add_variable_source(learner)
            graph.add_actors(replay, variables, name="actor" + suffix)
            graph.add_evaluator(variables, name="evaluator" + suffix)


def test_two_learners_are_logged_saved_and_restored_apart(tmp_path):
    directory = str(tmp_path / "run")
    settings = {"evaluate_period": 300, "num_evaluation_episodes": 2, "directory": directory}
    for engine, limit in (("serial", 600), ("threads", 900)):
        config = RunConfig(envs_per_actor=2, max_env_steps=limit, learner_log_period=10, **settings)
        result = launch.launch(make_program(Two(CONFIG), CARTPOLE, config), engine)
        assert result["reason"] == "max_env_steps"
        assert result["env_steps"] == result["evaluator_short"]["env_steps"] == limit
        saved = Checkpointer(tmp_path / "run" / "checkpoints").restore()
        parts = ["replay", "learner", "actor-0", "evaluator", "best"]
        for part in (*parts, "replay_short", "learner_short", "actor_short-0", "evaluator_short-best"):
            assert part in saved.names
        counts = saved.state("counter")["counts"]
        for name in ("learner", "learner_short"):
            assert saved.state(name)["steps"] == counts[f"{name}_steps"] > 0
        moves = [saved.state(f"actor{suffix}-0")["steps"] for suffix in ("", "_short")]
        assert sum(moves) == limit and min(moves) > 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for name in ("learner", "learner_short"):
        steps = [row["steps"] for row in rows if row["label"] == name]
        assert steps == sorted(set(steps))
        sizes = [row["replay/inserted"] for row in rows if row["label"] == name]
        assert 0 < sizes[-1] < 900  # of its own replay


def test_a_periodic_checkpoint_has_the_states_of_all_learners(tmp_path):
    checkpointer = RunCheckpointer(
        RunConfig(directory=str(tmp_path)), counter=Counter(), learners=["long", "short"]
    )
    checkpointer.put("long", {"steps": 1})
    assert checkpointer.commit("periodic", "long") is None
    checkpointer.put("short", {"steps": 1})
    assert checkpointer.commit("periodic", "short") is not None
    for steps, written in ((2, False), (3, True)):  # The other one has no data.
        checkpointer.put("long", {"steps": steps})
        assert (checkpointer.commit("periodic", "long") is not None) == written


def test_a_program_has_the_given_name_or_its_agents():
    assert [make_program(DQN(CONFIG), CARTPOLE, name=name).name for name in ("mine", None)] == ["mine", "dqn"]


NODE = launch.CourierNode(object)
NAMES = {
    "a second replay": (lambda graph: graph.add_replay(), "Give another name"),
    "a second learner": (lambda graph: graph.add_learner(None), "Give another name"),
    "a second evaluator": (lambda graph: graph.add_evaluator(None), "Give another name"),
    "other actors": (lambda graph: graph.add_actors(None, None), "Give another name"),
    "a node as the learner": (lambda graph: graph.add_node("learner", NODE), "name: got 'learner'"),
    "a node as a service": (lambda graph: graph.add_node("counter", NODE), "name: got 'counter'"),
    "a learner as the count": (lambda graph: graph.add_learner(None, name="env"), "name: got 'env'"),
}


@pytest.mark.parametrize(("add", "message"), NAMES.values(), ids=NAMES)
def test_a_name_is_used_once(add, message):
    class Twice(DQN):
        def build(self, graph):
            super().build(graph)
            add(graph)

    with pytest.raises(ValueError, match=message):
        make_program(Twice(CONFIG), CARTPOLE, RunConfig())


def dqn_program(config=None, **arguments):
    return make_program(DQN(CONFIG), CARTPOLE, config, **arguments)


ARGUMENTS = {
    "agent": (lambda: make_program(DQN, CARTPOLE), "agent: got the class DQN, expected an instance of Agent"),
    "config of the agent": (lambda: DQN(DQNConfig), r"config: got the class DQNConfig.*as DQNConfig\(\) is"),
    "dict of the agent": (lambda: DQN({"discount": 0.9}), "config: got {'discount': 0.9}, expected"),
    "config": (lambda: dqn_program(RunConfig), "config: got the class RunConfig, expected an instance"),
    "dict": (lambda: dqn_program({"seed": 1}), "config: got {'seed': 1}, expected an instance of RunConfig"),
    "callback": (
        lambda: dqn_program(callbacks=[print]),
        "callbacks: got .*print.*, expected an instance of Callback",
    ),
    "on_write": (lambda: dqn_program(on_write=3), "on_write: got 3, expected a function"),
}


@pytest.mark.parametrize(("call", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_an_argument_of_another_type(call, message):
    with pytest.raises(TypeError, match=message):
        call()


class Renamed(DQN):
    """DQN whose learner has another name."""

    def build(self, graph):
        replay = graph.add_replay()
        graph.add_actors(replay, graph.add_learner(replay, name="other"))


def test_a_run_without_a_learner_of_that_name_is_not_loaded_with_untrained_parameters(tmp_path):
    config = RunConfig(directory=str(tmp_path), max_env_steps=150)
    launch.launch(make_program(Renamed(CONFIG), CARTPOLE, config), engine="serial")
    assert "other" in Checkpointer(tmp_path / "checkpoints").restore().names
    with pytest.raises(RunError, match=r"a learner called 'learner', but .*other"):
        load_policy(tmp_path, allow=(__name__,))


@pytest.mark.parametrize(
    ("told", "ends"),
    [({}, False), ({"terminal_on_life_loss": True}, True), ({"terminal_on_life_loss": False}, False)],
)
def test_an_evaluation_plays_whole_games_unless_told_otherwise(told, ends):
    found = []

    def environment(terminal_on_life_loss=True, life_loss_terminates=None):
        found.append((terminal_on_life_loss, life_loss_terminates))
        return testing.EchoEnvironment()

    config = RunConfig(environment_options={"life_loss_terminates": True}, evaluation_options=told)
    for evaluation in (False, True):
        make.make_environment(RandomActions(), environment, config, 1, 0, evaluation=evaluation)
    assert found == [(True, True), (ends, False)]


class Seeded(testing.EchoEnvironment):
    seeds = []

    def seed(self, seed):
        self.seeds.append(seed)


def test_every_evaluation_plays_the_same_episodes():
    for seed in (1, 2):
        config = RunConfig(seed=seed, max_env_steps=40, evaluate_period=20, num_evaluation_episodes=3)
        launch.launch(make_program(RandomActions(), Seeded, config), engine="serial")
    # Three that are played, and those that would follow.
    assert Seeded.seeds == [*range(10_000, 10_006)] * 4
