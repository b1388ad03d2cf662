"""Elastic actors: a program goes on with those that are there, and lost ones come back."""

import pytest

from agents.impala import IMPALA
from agents.ppo import PPO
from examples.flows import PPOPlan
from framework.programs import RunConfig, make_program
from framework.runs.services import Counter

PATIENCE = 100.0


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
    for agent, why in ((PPO(), "None: a batch of PPO waits for every"), (PPOPlan(), "None for PPOPlan")):
        with pytest.raises(ValueError, match=f"min_actors: got 1, expected {why}"):
            make_program(agent, "gymnasium:CartPole-v1", RunConfig(num_actors=2, min_actors=1))
    assert make_program(IMPALA(), "gymnasium:CartPole-v1", config).min_nodes == {"actor": 1}
    config = RunConfig(num_actors=2, min_actors=2, variable_sources=2)
    program = make_program(IMPALA(), "gymnasium:CartPole-v1", config)
    assert program.min_nodes == {"actor": 2, "variable_source": 1}
