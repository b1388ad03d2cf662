"""Families of tasks: the rules of 2-D navigation, and how tasks are drawn and set."""

import functools

import numpy as np
import pytest

from framework import environments
from framework.environments.tasks import Navigation2D, TaskEnvironment, find_task_environment

NAME = "tasks:Navigation2D"


def action(*rows):
    return np.array(rows, np.float32)


def test_positions_rewards_and_both_ends():
    environment = environments.make(NAME, num_envs=2, seed=0, options={"max_steps": 3})
    assert isinstance(environment, TaskEnvironment)
    environment.set_task(np.array([[0.1, 0.05], [0.0, -0.3]]))
    timestep = environment.reset()
    assert timestep.step_type.tolist() == [0, 0] and not timestep.observation.any()
    # A velocity above 0.1 is clipped. Rewards are minus the distances after the move.
    timestep = environment.step(action([0.7, 0.0], [0.0, -0.1]))
    np.testing.assert_allclose(timestep.observation, [[0.1, 0.0], [0.0, -0.1]], atol=1e-6)
    np.testing.assert_allclose(timestep.reward, [-0.05, -0.2], atol=1e-6)
    assert timestep.step_type.tolist() == [1, 1]
    # Env 0 comes within 0.01 of its goal: a termination.
    timestep = environment.step(action([0.0, 0.045], [0.0, 0.0]))
    np.testing.assert_allclose(timestep.reward, [-0.005, -0.2], atol=1e-6)
    assert timestep.step_type.tolist() == [2, 1] and timestep.discount.tolist() == [0.0, 1.0]
    # Env 1 makes its third step: a truncation. Env 0 starts again, whatever the action.
    timestep = environment.step(action([0.1, 0.1], [0.0, 0.0]))
    assert timestep.step_type.tolist() == [0, 2] and timestep.discount.tolist() == [1.0, 1.0]
    assert timestep.reward.tolist() == pytest.approx([0.0, -0.2]) and not timestep.observation[0].any()
    timestep = environment.step(action([0.1, 0.0], [0.1, 0.1]))
    assert timestep.step_type.tolist() == [1, 0]
    np.testing.assert_allclose(timestep.reward, [-0.05, 0.0], atol=1e-6)  # the same goal


def test_tasks_are_drawn_uniformly_and_by_seed():
    environment = Navigation2D(seed=3)
    goals = environment.sample_tasks(4000)
    assert goals.shape == (4000, 2) and goals.dtype == np.float32
    assert goals.min() >= -0.5 and goals.max() <= 0.5
    # The standard deviation of the mean is 0.29 / sqrt(4000) = 0.005.
    np.testing.assert_allclose(goals.mean(0), 0.0, atol=0.03)
    np.testing.assert_array_equal(goals, Navigation2D(seed=3).sample_tasks(4000))
    assert not np.array_equal(goals, Navigation2D(seed=4).sample_tasks(4000))


def distances(environment):
    """The distance of each env's goal from the origin."""
    environment.reset()
    return -environment.step(np.zeros((environment.num_envs, 2), np.float32)).reward


def test_a_set_task_stays_and_without_one_every_episode_has_its_own():
    environment = Navigation2D(num_envs=3, seed=0)
    drawn = [distances(environment) for _ in range(2)]
    assert len(np.unique(drawn)) == 6
    environment.set_task(np.array([0.3, 0.4]))
    for _ in range(2):
        assert distances(environment).tolist() == pytest.approx([0.5] * 3)
    environment.set_task(None)
    assert len(np.unique(distances(environment))) == 3


def test_the_task_is_found_inside_wrappers():
    stacked = functools.partial(environments.FrameStack, num_frames=2)
    environment = environments.make(NAME, num_envs=2, wrappers=[stacked, environments.Flatten])
    assert isinstance(find_task_environment(environment), Navigation2D)
    with pytest.raises(TypeError, match=r"testing:Memory \(InlineEnvironment\), expected a TaskEnvironment"):
        find_task_environment(environments.make("testing:Memory"))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"task: got shape \(3, 2\), expected \(2,\) or \(2, 2\)"):
        Navigation2D(num_envs=2).set_task(np.zeros((3, 2)))
    with pytest.raises(ValueError, match="max_steps: got 0"):
        environments.make(NAME, options={"max_steps": 0})
    with pytest.raises(ValueError, match="expected one of tasks:Navigation2D"):
        environments.make("tasks:Navigation3D")
    environment = Navigation2D()
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match="not finite"):
        environment.step(action([np.nan, 0.0]))
