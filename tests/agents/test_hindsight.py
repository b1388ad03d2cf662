"""Agents with other goals: a whole run, and environments that have none."""

import dataclasses
import functools

import pytest
from agent_batches import CONTINUOUS, DISCRETE
from agent_cases import SMALL

from framework import adders, environments, replay
from framework.environments.goals import PointMaze


def short_maze(num_envs, seed):
    maze = functools.partial(PointMaze, max_steps=10)
    return environments.make(maze, num_envs=num_envs, seed=seed)


def test_a_run_learns_from_all_items(train):
    config = dataclasses.replace(
        SMALL["sac"].config, hindsight_goals=2, min_replay_size=16, batch_size=8, samples_per_insert=2
    )
    agent = type(SMALL["sac"])(config)
    result, rows = train(agent, short_maze, 440, num_evaluation_episodes=8, info_metrics=("is_success",))
    # All 40 transitions of an episode of 4 envs have 3 items, each drawn twice in batches of 8.
    items = 440 * 3
    assert result["learner_steps"] == pytest.approx(items * 2 / 8, rel=0.15)
    assert agent.optimizer_steps(440) == items * 2 / 8
    assert rows[-1]["critic_loss"] > 0 and "is_success" in result


@pytest.mark.parametrize(("name", "spec"), [("sac", CONTINUOUS), ("dqn", DISCRETE)])
def test_an_environment_without_goals_is_an_error(name, spec):
    agent = type(SMALL[name])(dataclasses.replace(SMALL[name].config, hindsight_goals=1))
    client = replay.EmbeddedClient([replay.Table.queue(adders.REPLAY_TABLE, 9)])
    with pytest.raises(ValueError, match="expected a dict with achieved_goal and desired_goal"):
        agent.make_adder(client, spec)
