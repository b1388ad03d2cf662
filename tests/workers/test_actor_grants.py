"""Actors take their steps in grants, and episodes go on from one grant to the next."""

import functools
import random

from helpers.node_clients import make_late_client
from hypothesis import example, given, settings
from hypothesis import strategies as st

import launch
from agents.random_actions import RandomActions
from framework import environments, programs, specs
from framework.environments.testing import FakeEnvironment
from framework.loggers import InMemoryLogger
from framework.runs.services import Counter, Monitor
from framework.workers.actor_worker import ActorWorker
from framework.workers.lockstep import Lockstep, Unrolls
from framework.workers.worker import Setup


class WithoutTables(RandomActions):
    def make_tables(self, spec):
        return []


def test_grants_grow_with_what_was_made_and_cut_no_episode(monkeypatch):
    log, asked, grant = InMemoryLogger(), [], Counter.grant

    def watched(self, who, n, spent=0, **counts):
        asked.append(n)
        return grant(self, who, n, spent)

    monkeypatch.setattr(Counter, "grant", watched)
    config = programs.RunConfig(
        envs_per_actor=4, max_env_steps=6001, evaluate_period=None, log_period=1000, directory=None
    )
    # The serial engine keeps all nodes in this process.
    program = programs.make_program(
        WithoutTables(), "gymnasium:CartPole-v1", config, logger_factory=lambda: log
    )
    assert launch.launch(program, engine="serial")["env_steps"] == 6001
    assert (asked[0], max(asked)) == (4 * 16, 4 * 64)
    assert asked.count(0) == 1  # the settlement
    assert asked[:-1] == sorted(asked[:-1])
    before, finished_steps = 0, 0.0
    for row in log.rows:
        finished_steps += (row["episodes"] - before) * row["episode_length"]
        before = row["episodes"]
    # Only the episodes open at the end may be missing: random ones are far shorter than 250 steps.
    assert 6001 - finished_steps < 4 * 250


def fake(num_envs, seed=0):
    make = functools.partial(FakeEnvironment, episode_length=5)
    return environments.make(make, num_envs=num_envs, seed=seed, stepping="inline")


SPEC = specs.make_environment_spec(fake(1))


def make_setup(actors, envs, counter, monitor, order):
    """The set-up of workers, and their clients of the services, which answer late."""
    config = programs.RunConfig(num_actors=actors, envs_per_actor=envs, log_period=100)
    setup = Setup(WithoutTables(), fake, SPEC, config)
    setup.evaluators.append("evaluator")  # It would end the program.
    return setup, {"counter": make_late_client(counter, order), "monitor": make_late_client(monitor, order)}


@settings(max_examples=25, deadline=None)
@given(
    actors=st.integers(1, 3),
    envs=st.integers(1, 4),
    budget=st.integers(1, 700),
    order=st.randoms(use_true_random=False),
)
def test_the_budget_is_made_exactly_however_late_the_counter_answers(actors, envs, budget, order):
    log = InMemoryLogger()
    counter = Counter(budget)
    setup, services = make_setup(actors, envs, counter, Monitor(log), order)

    workers = [ActorWorker(setup, replay=None, learner=None, index=i, **services) for i in range(actors)]
    for worker in workers:
        # Sometimes hardly any, as agents do whose unroll is nearly complete.
        worker._budget._limit = lambda: order.choice((1, 20, 1000))
    running = list(workers)
    while running:
        worker = order.choice(running)
        worker.step()
        assert counter.get_counts().get("env_steps", 0) + counter.granted() <= budget
        # Schedules lag by no more than that.
        assert all(each._budget.spent <= max(16, each._budget._steps // 16) * envs for each in workers)
        running = [each for each in running if not each.finished()]
    assert counter.get_counts()["env_steps"] == budget == sum(each.save()["steps"] for each in workers)
    assert not counter.granted()
    for worker in workers:
        worker.close()
    for index, worker in enumerate(workers):
        rows = [row for row in log.rows if row["label"] == f"actor-{index}"]
        steps = [row["steps"] for row in rows]
        assert steps == sorted(set(steps)), "A row was late."
        assert steps[-1:] == [made for made in [worker.save()["steps"]] if made]
    assert counter.get_counts().get("actor_episodes", 0) == sum(each.save()["episodes"] for each in workers)


class Versions:
    """A learner that makes a version as soon as every actor has collected its unroll for it."""

    def __init__(self):
        self.unrolls, self.unroll_length = [], 0

    @property
    def version(self):
        return min(unrolls.done for unrolls in self.unrolls) // self.unroll_length

    def wait_for_version(self, version, timeout, name=None):
        return self.version >= version


class Acting:
    """A collector that acts with the newest version of its last update."""

    adders, version = (), 0

    def __init__(self, learner):
        self._learner = learner

    def update(self):
        self.version = self._learner.version

    def flush_pending(self):
        """It has no adders."""


class Waits(Lockstep):
    def open(self):
        needed = self._unrolls.needed_version() or 0
        opened = super().open()
        assert not opened or self._collector.version >= needed or self._counter.is_ending()
        return opened

    def end(self):
        """Without the wait for the learner's last step."""


# In the examples, an actor stops inside its unroll while another one holds a few steps too many.
@example(actors=2, envs=2, unroll_length=24, lag=0, budget=67, order=random.Random(347974))
@example(actors=2, envs=2, unroll_length=39, lag=0, budget=122, order=random.Random(792447))
@example(actors=3, envs=1, unroll_length=35, lag=0, budget=170, order=random.Random(56773))
@settings(max_examples=25, deadline=None)
@given(
    actors=st.integers(1, 3),
    envs=st.integers(1, 4),
    unroll_length=st.integers(2, 40),
    lag=st.integers(0, 1),
    budget=st.integers(1, 400),
    order=st.randoms(use_true_random=False),
)
def test_actors_in_lockstep_make_the_budget_exactly(actors, envs, unroll_length, lag, budget, order):
    counter, learner = Counter(budget), Versions()
    setup, services = make_setup(actors, envs, counter, Monitor(), order)

    workers, learner.unroll_length = [], unroll_length
    for index in range(actors):
        worker = ActorWorker(setup, replay=None, learner=None, index=index, **services)
        unrolls = Unrolls(unroll_length, lag)
        worker._gates.insert(0, Waits(f"actor-{index}", learner, counter, Acting(learner), unrolls))
        worker._budget._limit = functools.partial(unrolls.limit, envs)
        learner.unrolls.append(unrolls)
        workers.append(worker)
    running, idle = list(workers), 0
    while running:
        before = [(worker.save()["steps"], worker.finished()) for worker in workers]
        for worker in order.sample(running, len(running)):
            for _ in range(order.randrange(1, 12)):
                if not worker.finished():
                    worker.step()
        running = [worker for worker in running if not worker.finished()]
        moved = before != [(worker.save()["steps"], worker.finished()) for worker in workers]
        idle = 0 if moved else idle + 1
        assert idle < 50, f"All wait, with {counter.ungranted()} steps to grant."
    assert counter.get_counts()["env_steps"] == budget
    for worker in workers:
        worker.close()
