"""Workers on their own: the version of a restarted learner, the parameters that the evaluator takes."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
import tree

from agents.dqn import DQN, DQNConfig
from agents.ppo import PPO, PPOConfig
from agents.random_actions import RandomActions
from agents.sac import SAC, SACConfig
from framework import environments, replay, specs
from framework.environments.testing import FakeEnvironment
from framework.loggers import InMemoryLogger
from framework.programs import RunConfig
from framework.replay.errors import DeadlineExceededError, ServerLost
from framework.runs.services import Counter, Monitor
from framework.variables import VariableBlock
from framework.workers import learner
from framework.workers.actor_worker import ActorWorker
from framework.workers.evaluator import Evaluator
from framework.workers.learner_worker import LearnerWorker
from framework.workers.worker import Setup


def fake(num_envs, seed=0, **options):
    make = functools.partial(FakeEnvironment, **options)
    return environments.make(make, num_envs=num_envs, seed=seed, stepping="inline")


DQN_CONFIG, PPO_CONFIG = DQNConfig(hidden_sizes=(8,)), PPOConfig(hidden_sizes=(8,))
RESTARTS = {
    # agent, learner steps before the restart, version after it
    "before its first step": (DQN(DQN_CONFIG), 0, 0),  # policies take version 0 for: nothing was learned
    "after some steps": (DQN(DQN_CONFIG), 10, 11),
    "before its first step, with a policy lag": (PPO(PPO_CONFIG), 0, 1),  # actors may wait for version 1
}


def make_learner_worker(agent, seed, counter=None, **settings):
    spec = specs.make_environment_spec(fake(1))
    client = replay.EmbeddedClient(agent.make_tables(spec))
    setup = Setup(agent, fake, spec, RunConfig(**settings))
    services = {"counter": counter or Counter(), "monitor": Monitor()}
    return LearnerWorker(setup, replay=client, seed=seed, **services)


def values_of(worker):
    flat = tree.flatten(worker.variable_block().get_variables().values)
    return np.concatenate([leaf.ravel() for leaf in flat])


def test_a_learner_node_gives_and_takes_its_whole_state():
    one, other = (make_learner_worker(DQN(DQN_CONFIG), seed) for seed in (1, 2))
    with torch.no_grad():  # As if it had learned.
        for parameter in one._learner.learner.networks.parameters():
            parameter.add_(1.0)
    assert not np.array_equal(values_of(one), values_of(other))
    other.set_state(one.get_state())
    assert other.variable_block().version == 1
    one._learner.publish_again()
    np.testing.assert_array_equal(values_of(one), values_of(other))
    wrong = make_learner_worker(DQN(DQNConfig(hidden_sizes=(16,))), 3)
    before = values_of(wrong)
    with pytest.raises(RuntimeError, match="size mismatch"):
        wrong.set_state(one.get_state())
    wrong._learner.publish_again()
    np.testing.assert_array_equal(values_of(wrong), before)


@pytest.mark.parametrize("agent, steps, version", RESTARTS.values(), ids=RESTARTS)
def test_the_version_of_a_restarted_learner(tmp_path, monkeypatch, agent, steps, version):
    monkeypatch.setattr(learner, "shared_path", lambda: str(tmp_path / "block"))
    environment = fake(1)
    spec = specs.make_environment_spec(environment)
    counter = Counter()

    def make():
        client = replay.EmbeddedClient(agent.make_tables(spec))
        return LearnerWorker(
            Setup(agent, fake, spec, RunConfig()), replay=client, counter=counter, monitor=Monitor(), seed=3
        )

    first = make()
    assert first.variable_block().version == 0
    if steps:
        first._learner.published.steps += steps
        with monkeypatch.context() as patch, pytest.raises(TypeError):
            patch.setattr(counter, "increment", None)  # It does not answer.
            first._learner.published.publish()
        first._learner.published.publish()
        assert counter.get_counts() == {"learner_steps": steps}
        counter.restore({"counts": {"learner_steps": 3}})  # It is restarted from an older checkpoint.
        for _ in range(2):
            first._learner.published.publish()
        assert counter.get_counts() == {"learner_steps": steps}
    assert make().variable_block().version == version


class Kept(dict):
    """A checkpointer."""

    put = dict.__setitem__


def test_the_first_state_is_kept_before_any_checkpoint():
    agent, spec = DQN(DQN_CONFIG), specs.make_environment_spec(fake(1))
    kept, setup = Kept(), Setup(agent, fake, spec, RunConfig())
    made = agent.make_learner(agent.make_networks(spec), spec)
    published = learner.Published("learner", setup, made, Counter(), kept)
    for steps in (0, 7):
        published.steps = steps
        published.save_first()
        assert kept["learner"]["steps"] == 0


def learner_with_data(log, kept=None):
    environment, agent = fake(2), DQN(dataclasses.replace(DQN_CONFIG, min_replay_size=10, batch_size=4))
    spec = specs.make_environment_spec(environment)
    client = replay.EmbeddedClient(agent.make_tables(spec))
    setup = Setup(agent, fake, spec, RunConfig(learner_log_period=1))
    services = {"counter": Counter(), "monitor": Monitor(log), "checkpointer": kept}
    learner = LearnerWorker(setup, replay=client, **services)
    adder = agent.make_adder(client, spec)
    adder.add_first(environment.reset())
    for _ in range(20):
        action = np.zeros(2, spec.actions.dtype)
        adder.add(action, environment.step(action))
    return learner, client


@pytest.mark.parametrize("error", [DeadlineExceededError, ServerLost])
def test_a_learner_goes_on_while_replay_does_not_answer(error, monkeypatch):
    log = InMemoryLogger()
    learner, client = learner_with_data(log)

    def server_info(timeout):
        raise error("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(client, "server_info", server_info)
        learner.step()
    learner.step()
    assert ["replay/size" in row for row in log.rows] == [False, True]
    assert all("loss" in row for row in log.rows)


@pytest.mark.parametrize("fails", ["learner.parameters", "published.save", "report.log"])
def test_a_learner_that_cannot_do_all_at_its_end_does_the_rest(fails, monkeypatch):
    kept, (part, method) = Kept(), fails.split(".")
    learner, _ = learner_with_data(InMemoryLogger(), kept)
    learner.step()
    monkeypatch.setattr(getattr(learner._learner, part), method, None)
    with pytest.raises(TypeError):
        learner.close()
    assert next(learner._dataset, None) is None, "it is closed"
    assert (part == "report") == ("learner" in kept)


def test_an_actor_whose_last_row_cannot_be_written_closes_its_envs(monkeypatch):
    environment, closed = fake(1), []
    monkeypatch.setattr(environment, "close", functools.partial(closed.append, True))
    setup = Setup(
        RandomActions(), lambda *_: environment, specs.make_environment_spec(environment), RunConfig()
    )
    monitor = Monitor()
    worker = ActorWorker(setup, replay=None, learner=None, counter=Counter(), monitor=monitor)
    worker.step()
    monkeypatch.setattr(monitor, "write", None)
    with pytest.raises(TypeError):
        worker.close()
    assert closed


@pytest.mark.parametrize("agent", [SAC(SACConfig(hidden_sizes=(8,))), DQN(DQN_CONFIG)], ids=["sac", "dqn"])
def test_an_evaluator_takes_what_its_policy_needs_and_keeps_that(agent):
    environment = fake(1, episode_length=3)
    spec = specs.make_environment_spec(environment)
    networks = agent.make_networks(spec)
    learner = agent.make_learner(networks, spec)
    needed = agent.make_policy(networks, evaluation=True).variables
    assert needed
    # The others are not even published.
    block = VariableBlock({name: learner.parameters()[name] for name in needed})
    block.publish(5, {name: learner.parameters()[name] for name in needed}, env_steps=50)
    kept = Kept()
    make = functools.partial(fake, episode_length=3)
    config = RunConfig(num_evaluation_episodes=2, evaluate_period=100)
    setup = Setup(agent, make, spec, config)
    counter = Counter()
    worker = Evaluator(setup, learner=block, counter=counter, monitor=Monitor(), checkpointer=kept)
    assert worker.evaluate()["variables_version"] == 5
    assert {name.partition(".")[0] for name in kept["best"]["networks"]} == set(needed)
    assert kept["evaluator"] == {"evaluated_at": 0}
    for steps, is_due in ((99, False), (31, True), (69, False), (1, True)):  # A late one delays no other.
        counter.increment(env_steps=steps)
        assert worker.ready() == is_due
        if is_due:
            worker.evaluate()
