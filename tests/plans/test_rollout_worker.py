"""The worker of a plan on its own: what it collects, and what it does with the program's budget."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from helpers.node_clients import make_client

import launch
from agents.a2c import A2C, A2CConfig
from framework import adders, environments, specs
from framework.environments.testing import FakeEnvironment
from framework.learners import SGDLearner
from framework.networks import as_tensors
from framework.plans.rollout_worker import BudgetSpent
from framework.programs import GradientWorker, RolloutWorker, RunConfig, concatenate
from framework.runs.services import Counter, Monitor
from framework.variables import VariableBlock
from framework.workers.worker import Setup

ENVS, LENGTH = 3, 4
AGENT = A2C(A2CConfig(hidden_sizes=(8,), unroll_length=LENGTH))


def fake(num_envs, seed=0):
    make = functools.partial(FakeEnvironment, episode_length=5)
    return environments.make(make, num_envs=num_envs, seed=seed, stepping="inline")


SPEC = specs.make_environment_spec(fake(1))


def new_learner():
    return AGENT.make_learner(AGENT.make_networks(SPEC), SPEC)


@pytest.fixture
def make():
    """`make(max_steps, number)`: workers of one counter, with the learner's parameters as version 7."""
    made = []

    def makes(max_steps=None, number=1, cls=RolloutWorker, monitor=None):
        learner, counter = new_learner(), Counter(max_steps)
        block = VariableBlock(learner.parameters())
        block.publish(7, learner.parameters(), env_steps=70)
        setup = Setup(AGENT.for_worker(ENVS), fake, SPEC, RunConfig(num_actors=number, envs_per_actor=ENVS))
        setup.evaluators.append("evaluator")  # It would end the program.
        services = {
            "learner": block,
            "counter": make_client(counter),
            "monitor": make_client(monitor or Monitor()),
        }
        made.extend(cls(setup, index=index, seed=index, **services) for index in range(number))
        return learner, counter, made

    yield makes
    for worker in made:
        worker.close()


def test_a_sample_is_an_unroll_of_every_env_with_the_newest_parameters(make):
    _, counter, (worker,) = make()
    one, other = worker.sample(), worker.sample()
    assert one.data.observation.shape == (ENVS, LENGTH + 1, 3)
    assert isinstance(one.data.reward, np.ndarray)
    assert (one.data.extras["version"][one.data.mask > 0] == 7).all()
    # The bootstrap observation of one unroll is the first of the next.
    np.testing.assert_array_equal(one.data.observation[:, -1], other.data.observation[:, 0])
    assert counter.get_counts()["env_steps"] == ENVS * LENGTH  # The second is reported with the next request.
    both = concatenate([one, other])
    np.testing.assert_array_equal(both.data.reward[ENVS:], other.data.reward)
    assert len(both.info.key) == 2 * ENVS


class Stores(RolloutWorker):
    """Keeps its table, so that a look at it is no read, which would write what is staged."""

    def make_adder(self, client):
        self.table = client.tables["queue"]
        return adders.NStepTransitionAdder(client, 1, 0.9, priority_fns={"queue": None}, max_delay=1e9)


def test_what_a_call_has_collected_is_in_replay_at_its_end(make):
    _, _, (worker,) = make(cls=Stores)
    assert worker.collect(1) == len(worker.table) == ENVS
    with worker.granted(1):
        worker.step_envs()
    assert len(worker.table) == 2 * ENVS


def test_gradients_are_those_of_the_learner(make):
    learner, _, (worker,) = make(cls=GradientWorker)
    sample = worker.sample()
    gradients = worker.gradients(sample)
    assert int(gradients.learner_steps) == 7
    assert isinstance(learner, SGDLearner)
    expected = learner.gradients(sample._replace(data=as_tensors(sample.data)))
    for one, other in zip(gradients.values, expected.values, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_budget_is_made_exactly_however_late_a_call_comes(make):
    budget = 2 * ENVS * LENGTH + 5  # For one round, some steps that resets save, and 5 more.
    _, counter, (one, other) = make(budget, 2)
    one.sample(), other.sample()
    with pytest.raises(BudgetSpent, match="actor-0: too few env steps are left for 4 steps of every env"):
        one.sample()
    assert counter.get_counts()["env_steps"] < budget  # Not before the last parameters are published.
    one.finish()
    with pytest.raises(BudgetSpent):
        one.sample()
    other.finish()
    with pytest.raises(BudgetSpent):
        other.sample()
    assert counter.get_counts()["env_steps"] == budget and counter.granted() == 0


def test_items_that_find_no_room_at_the_end_are_counted(make, monkeypatch):
    monitor = Monitor()
    _, _, (worker,) = make(2 * ENVS * LENGTH, monitor=monitor)
    worker.sample()
    monkeypatch.setattr(worker.collector.actor.adder, "close", lambda timeout: 2)
    worker.finish()
    assert monitor.snapshot()["labels"]["actor-0"]["dropped_items"] == 2


def test_a_stop_ends_a_call(make, monkeypatch):
    _, _, (worker,) = make()
    worker.sample()
    stopped = launch.stop_event()
    stopped.set()
    monkeypatch.setattr(launch, "stop_event", lambda: stopped)
    with pytest.raises(launch.ProgramStopped, match="actor-0"):
        worker.sample()
