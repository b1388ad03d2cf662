"""Environments with goals: rewards as functions of goals, wherever the environment is, and the maze."""

import functools
import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from framework import environments, specs
from framework.environments.goals import PointMaze

MAZE = "tasks:PointMaze"


class Line(gymnasium.Env):
    """A number that actions move to a goal, where the episode ends."""

    observation_space = spaces.Dict(
        dict.fromkeys(("observation", "achieved_goal", "desired_goal"), spaces.Box(-9, 9, (1,), np.float64))
    )
    action_space = spaces.Box(-1, 1, (1,))

    def _see(self):
        place = np.array([self._place])
        return {"observation": place, "achieved_goal": place, "desired_goal": np.array([2.0])}

    def reset(self, seed=None, options=None):
        self._place = 0.0
        return self._see(), {}

    def step(self, action):
        self._place += float(action[0])
        seen = self._see()
        pair = seen["achieved_goal"], seen["desired_goal"]
        reward = self.compute_reward(*pair, {})
        return seen, reward, self.compute_terminated(*pair, {}), False, {"is_success": float(reward == 0)}

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -(np.linalg.norm(achieved_goal - desired_goal, axis=-1) > 0.5).astype(np.float64)

    def compute_terminated(self, achieved_goal, desired_goal, info):
        assert achieved_goal.shape == (1,), "one at a time"
        return bool(abs(achieved_goal - desired_goal) <= 0.5)


class Blind(Line):
    compute_reward = None

    def step(self, action):
        return self._see(), 0.0, False, False, {}


def outcome_of(*arguments, **options):
    with environments.make(*arguments, **options) as environment:
        spec = pickle.loads(pickle.dumps(specs.make_environment_spec(environment)))
    return specs.goal_outcome(spec)


WAYS = {
    "inline": {},
    "two envs": {"num_envs": 2},
    "processes": {"stepping": "processes", "num_processes": 1},
    "numbers of info": {"info_metrics": ("is_success",)},
    "precision": {"wrappers": [environments.SinglePrecision]},
    "actions": {"wrappers": [environments.RescaleAction]},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_functions_of_a_gymnasium_environment_go_with_its_spec(way):
    rewards, ends = outcome_of(Line, **WAYS[way])(
        np.array([[0.0], [1.6], [5.0]]), np.array([[2.0], [2], [5]])
    )
    assert rewards.tolist() == [-1, 0, 0] and ends.tolist() == [False, True, True]


def test_those_of_a_batched_environment_do_too():
    rewards, ends = outcome_of(MAZE, num_envs=3)(np.zeros((2, 2)), np.array([[0.03, 0.03], [0.1, 0]]))
    assert rewards.tolist() == [0, -1] and not ends.any()


LACKS = {
    "goals": ("gymnasium:CartPole-v1", {}, "expected a dict with achieved_goal and desired_goal"),
    "a dict": (MAZE, {"wrappers": [environments.Flatten]}, "unless a wrapper changes them"),
}


@pytest.mark.parametrize("what", LACKS)
def test_an_environment_without_goals_is_told_what_it_lacks(what):
    name, options, message = LACKS[what]
    with pytest.raises(ValueError, match=message):
        outcome_of(name, **options)


def test_an_environment_without_the_method_is_told_so():
    outcome = outcome_of(Blind)
    with pytest.raises(ValueError, match=r"Blind: got no compute_reward.*Hindsight needs it"):
        outcome(np.zeros((1, 1)), np.zeros((1, 1)))


def place(environment, x, y, goal=(0, 0)):
    environment.reset()
    environment._places[:], environment._goals[:] = (x, y), goal


MOVES = {
    "free": ((0.0, -0.5), (1, 1), (0.1, -0.4)),
    "far": ((0.0, -0.5), (5, -9), (0.1, -0.6)),
    "at the wall": ((0.0, -0.02), (0.5, 1), (0.05, -0.02)),
    "at the wall from above": ((-0.2, 0.05), (0, -1), (-0.2, 0.05)),
    "beside the wall": ((0.7, -0.02), (0, 1), (0.7, 0.08)),
    "at its end": ((0.25, -0.05), (0.4, 1), (0.29, -0.05)),
    "past its end": ((0.25, -0.05), (1, 0.8), (0.35, 0.03)),
    "past its other end": ((-0.25, -0.05), (-1, 0.8), (-0.35, 0.03)),
    "in a corner": ((0.95, 0.95), (1, 1), (1, 1)),
}


@pytest.mark.parametrize("how", MOVES)
def test_moves_in_the_maze(how):
    environment = PointMaze(num_envs=2, seed=0)
    before, move, after = MOVES[how]
    place(environment, *before)
    timestep = environment.step(np.array([move, move], np.float32))
    np.testing.assert_allclose(timestep.observation["achieved_goal"], [after, after], atol=1e-6)


def test_rewards_and_episodes_of_the_maze():
    environment = PointMaze(num_envs=200, seed=3, max_steps=2)
    timestep = environment.reset()
    starts, goals = timestep.observation["observation"], timestep.observation["desired_goal"]
    assert (
        np.all(starts.max(0) <= [1, -0.1])
        and starts.min() >= -1
        and np.isnan(environment.infos["is_success"]).all()
    )
    assert goals.min() < -0.9 and goals.max() > 0.9 and np.ptp(starts[:, 0]) > 1.8
    place(environment, 0.5, 0.5, goal=(0.5, 0.54))
    still = np.zeros((200, 2), np.float32)
    first, second, third = (environment.step(still) for _ in range(3))
    assert first.reward.tolist() == [0] * 200 and environment.infos["is_success"].shape == (200,)
    assert [each.step_type[0] for each in (first, second, third)] == [1, 2, 0]
    assert second.discount.all(), "it is truncated, and the goal ends nothing"
    assert not np.array_equal(third.observation["desired_goal"], goals)


def test_the_fetch_robot_of_gymnasium_robotics():
    pytest.importorskip("gymnasium_robotics")
    make = functools.partial(environments.make, "robotics:FetchReach-v4", num_envs=2, seed=1)
    with make(info_metrics=("is_success",)) as environment:
        timestep = environment.reset()
        for _ in range(3):
            timestep = environment.step(np.ones((2, 4), np.float32))
        seen, outcome = timestep.observation, specs.goal_outcome(environment.spec)
        np.testing.assert_array_equal(
            outcome(seen["achieved_goal"], seen["desired_goal"])[0], timestep.reward
        )
        assert environment.infos["is_success"].tolist() == [0, 0]
    with pytest.raises(ValueError, match="unknown environment 'gymnasium:Fetch'"):
        environments.make("robotics:Fetch")
