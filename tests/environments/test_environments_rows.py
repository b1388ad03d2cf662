"""Rows of time steps, into which an environment writes."""

import copy
import functools

import numpy as np
import pytest
import tree
from faulty_environment import FaultyEnvironment

from framework import environments
from framework.environments import EnvironmentFault, testing
from framework.environments.rows import TimeStepRows

LAST_ROW = 3


def make(first=0, fault=None):
    factory = testing.EchoEnvironment if fault is None else functools.partial(FaultyEnvironment, fault, at=2)
    environment = environments.make(factory, num_envs=2)
    timestep = environment.reset()
    rows = TimeStepRows(timestep, first, LAST_ROW)
    environment.write_to(rows)
    return environment, rows, np.zeros_like(environment.step(np.zeros(2, np.int64)).reward, np.int64)


def test_each_time_step_is_a_row_and_the_first_follows_the_last():
    environment, rows, action = make(first=1)
    alone = environments.make(testing.EchoEnvironment, num_envs=2)
    alone.reset()
    alone.step(action)
    places = []
    for _ in range(7):
        rows.advance()
        places.append(rows.at)
        timestep = environment.step(action)
        assert timestep is rows.rows[rows.at].timestep
        tree.map_structure(np.testing.assert_array_equal, timestep, alone.step(action))
    assert places == [2, 3, 1, 2, 3, 1, 2]


def test_values_are_checked_together_and_a_fault_stays_until_a_restart():
    environment, rows, action = make(fault="nan_reward")
    rows.advance()
    environment.step(action)
    rows.advance()
    for _ in range(2):
        with pytest.raises(EnvironmentFault, match="env 0: reward holds NaN"):
            rows.check()
    rows.restart(0)
    rows.check()


@pytest.mark.parametrize("why", ["retired", "other dtype", "other envs", "none"])
def test_rows_that_cannot_be_written_stay_as_they_are(why):
    environment, rows, action = make()
    before = copy.deepcopy(rows.rows[0].timestep)
    if why == "retired":
        rows.retired = True
    elif why == "none":
        environment.write_to(None)
    else:
        other = before._replace(reward=before.reward.astype(np.float64))
        if why == "other envs":
            other = tree.map_structure(lambda leaf: leaf[:1], before)
        rows = TimeStepRows(other, 0, LAST_ROW)
        before = copy.deepcopy(rows.rows[0].timestep)
        environment.write_to(rows)
    timestep = environment.step(action)
    assert timestep is not rows.rows[rows.at].timestep
    tree.map_structure(np.testing.assert_array_equal, rows.rows[0].timestep, before)


def test_a_copy_of_an_environment_leaves_the_rows_behind():
    environment, rows, action = make()
    copied = copy.deepcopy(environment)
    before = copy.deepcopy(rows.rows[0].timestep)
    copied.step(action + 1)
    tree.map_structure(np.testing.assert_array_equal, rows.rows[0].timestep, before)
