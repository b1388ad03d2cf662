"""MAML: its meta-gradient, evaluation by adaptation, every field of its config, and that it learns."""

import dataclasses
import functools
from unittest import mock

import config_fields
import numpy as np
import pytest
import torch
import tree
from dm_env import specs as dm_specs
from torch.func import functional_call

import launch
from agents.maml import MAML, MAMLConfig, MAMLNetworks, Rows
from framework import environments, losses, specs
from framework.actors import EnvironmentLoop, PolicyActor
from framework.commands.evaluate import evaluate
from framework.environments.tasks import Navigation2D
from framework.environments.testing import FakeEnvironment
from framework.loggers import read_jsonl
from framework.networks import MLP, make_policy_head
from framework.programs import RunConfig, load_policy, make_program
from framework.replay import ReplaySample
from framework.types import Step

NAME = "tasks:Navigation2D"
SPEC = specs.make_environment_spec(environments.make(NAME))
SMALL = MAMLConfig(unroll_length=6, hidden_sizes=(8,), activation="tanh", evaluation_tasks=2)


class Short(Navigation2D):
    """Episodes of 40 steps."""

    def __init__(self, num_envs=1, seed=None):
        super().__init__(num_envs, seed, max_steps=40)


class InParts(Short):
    """Actions are dicts of the two coordinates."""

    def __init__(self, num_envs=1, seed=None):
        super().__init__(num_envs, seed)
        coordinate = dm_specs.BoundedArray((1,), np.float32, -0.1, 0.1)
        self.spec = self.spec._replace(actions={"x": coordinate, "y": coordinate})

    def step(self, action):
        return super().step(np.concatenate([action["x"], action["y"]], -1))


def make_networks(config):
    torch.manual_seed(0)
    return MAML(config).make_networks(SPEC)


def make_data(seed, num_envs=3, length=6):
    """Unrolls as the adder writes them. The second env starts a new episode."""
    random = np.random.default_rng(seed)
    shape = (num_envs, length + 1)
    starts, mask = np.zeros(shape, bool), np.ones(shape, np.float32)
    starts[:, 0] = starts[1, 3] = True
    mask[:, -1] = mask[1, 2] = 0.0
    draw = functools.partial(random.normal, size=(*shape, 2))
    observation, action = draw().astype(np.float32), np.zeros((*shape, 2), np.float32)
    reward = (random.normal(size=shape) * mask).astype(np.float32)
    extras = {"action": draw().astype(np.float32)}
    extras["log_prob"] = random.normal(-3, 0.3, shape).astype(np.float32)
    data = Step(observation, action, reward, mask, starts, extras, mask)
    return tree.map_structure(torch.from_numpy, data)


def make_batch(config, networks, tasks=3, num_envs=3):
    """A learner's batch, `[tasks, rounds, B, T, ...]`."""
    agent, length = MAML(config), config.unroll_length

    def stack(parts):
        return tree.map_structure(lambda *leaves: torch.stack(leaves), *parts)

    rounds = range(1 + config.inner_steps)
    rows = [
        stack([agent.make_rows(networks, make_data(10 * t + k, num_envs, length)) for k in rounds])
        for t in range(tasks)
    ]
    return ReplaySample((), stack(rows))


@pytest.mark.parametrize("inner_steps", [0, 1, 2])
def test_the_meta_gradient_is_that_of_a_loop_with_autograd(inner_steps):
    config = dataclasses.replace(SMALL, inner_steps=inner_steps, inner_learning_rate=0.7)
    networks = make_networks(config)
    rows: Rows = make_batch(config, networks).data
    context = mock.Mock()
    parameters = dict(networks.named_parameters())
    loss = MAML(config).loss(networks, rows, context).loss
    gradients = torch.autograd.grad(loss, list(parameters.values()))

    def log_probs(values, k):
        policy = functional_call(networks, values, (rows.observation[task, k],))
        return policy.log_prob(rows.action[task, k])

    total = 0.0
    for task in range(3):
        adapted = parameters
        for k in range(inner_steps):
            ratios = (log_probs(adapted, k) - rows.log_prob[task, k]).exp()
            mask = rows.mask[task, k]
            inner = -(ratios * rows.advantage[task, k] * mask).sum() / mask.sum()
            slopes = torch.autograd.grad(inner, list(adapted.values()), create_graph=True)
            adapted = {
                name: value - 0.7 * slope
                for (name, value), slope in zip(adapted.items(), slopes, strict=True)
            }
        last = inner_steps
        others = rows.log_prob[task, last], rows.advantage[task, last], rows.mask[task, last]
        surrogate = losses.clipped_surrogate(log_probs(adapted, last), *others, config.clip)
        total = total + surrogate.loss / 3
    torch.testing.assert_close(loss, total)
    for one, other in zip(gradients, torch.autograd.grad(total, list(parameters.values())), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_rows_have_the_first_episode_s_return_and_normalized_advantages():
    data = make_data(0)
    rows = MAML(SMALL).make_rows(make_networks(SMALL), data)
    assert rows.mask.shape == (3, 6) and rows.mask.sum() == 17
    expected = [data.reward[0, :6].sum(), data.reward[1, :2].sum(), data.reward[2, :6].sum()]
    np.testing.assert_allclose(rows.episode_return[:, 0], expected, rtol=1e-5)
    counted = rows.advantage[rows.mask > 0]
    assert abs(counted.mean()) < 1e-5 and abs(counted.std(correction=0) - 1) < 1e-4
    assert (rows.advantage[rows.mask == 0] == 0).all()


def test_an_evaluation_adapts_in_each_task_and_restores_the_parameters():
    config = dataclasses.replace(SMALL, inner_learning_rate=0.5)
    agent, networks = MAML(config), make_networks(config)
    options, seeded = {"max_steps": 4}, [environments.SeededEpisodes]
    environment = environments.make(NAME, num_envs=3, options=options, wrappers=seeded)
    policy = agent.make_policy(networks, evaluation=True)
    loop = EnvironmentLoop(environment, PolicyActor(policy, num_envs=3), should_update=False)
    initial = {name: value.clone() for name, value in networks.state_dict().items()}
    played = agent.play(loop, policy, 3)
    assert {name: len(array) for name, array in played.items()} == dict.fromkeys(
        ("episode_return", "episode_length", "env", "return_before"), 6
    )
    torch.testing.assert_close(networks.state_dict(), initial, rtol=0, atol=0)
    # Greedy episodes of one task are alike, those of two tasks are not.
    for values in (played["episode_return"], played["return_before"]):
        assert np.ptp(values[:3]) < 1e-6 and abs(values[0] - values[3]) > 1e-3
    assert (np.abs(played["episode_return"] - played["return_before"]) > 1e-6).all()
    unadapted = MAML(dataclasses.replace(config, evaluation_inner_steps=0))
    before, played = played["return_before"], unadapted.play(loop, policy, 3)
    np.testing.assert_array_equal(played["episode_return"], played["return_before"])
    np.testing.assert_array_equal(before, played["return_before"])  # Every evaluation has the same tasks.


def test_an_environment_without_tasks_is_named():
    with pytest.raises(TypeError, match="expected a TaskEnvironment"):
        make_program(MAML(SMALL), FakeEnvironment)


def wide(config, spec):
    networks = MAMLNetworks(config, spec)
    networks.body = MLP(2, (17,))
    networks.head = make_policy_head(17, networks.actions.head_spec)
    return networks


def test_networks_of_one_s_own():
    run = RunConfig(envs_per_actor=2, max_learner_steps=2, evaluate_period=None)
    result = launch.launch(make_program(MAML(SMALL, wide), NAME, run), engine="serial")
    assert result == {"reason": "max_learner_steps", "learner_steps": 2}
    with pytest.raises(ValueError, match="networks_fn: got Linear without actions, encoder"):
        MAML(SMALL, lambda config, spec: torch.nn.Linear(1, 1)).make_networks(SPEC)


def learned(agent, spec):
    """Parameters after two learner steps, as one vector."""
    torch.manual_seed(0)
    config, networks = agent.config, make_networks(agent.config)
    learner = agent.make_learner(networks, SPEC)
    for env_steps in (0, 100):
        learner.env_steps = env_steps
        learner.step(make_batch(config, networks, tasks=4))
    return config_fields.flat(networks).numpy()


def rows_of_a_worker(agent, spec):
    """The shape of what a worker samples, from the rows that its learner sees."""
    run = RunConfig(envs_per_actor=2, max_learner_steps=1, evaluate_period=None)
    shapes = []
    with mock.patch.object(MAML, "prepare", autospec=True, side_effect=MAML.prepare) as prepare:
        launch.launch(make_program(agent, NAME, run), engine="serial")
    for call in prepare.call_args_list:
        shapes.append(call.args[2].data.mask.shape)
    return str(shapes)


def evaluated(agent, spec):
    networks = make_networks(agent.config)
    environment = environments.make(NAME, num_envs=2, seed=1, options={"max_steps": 4})
    policy = agent.make_policy(networks, evaluation=True)
    loop = EnvironmentLoop(environment, PolicyActor(policy, num_envs=2), should_update=False)
    return agent.play(loop, policy, 2)["episode_return"]


def advantages(agent, spec):
    return agent.make_rows(make_networks(agent.config), make_data(0)).advantage.numpy()


by = config_fields.by
FIELDS = {
    **by(advantages, discount=0.5, gae_lambda=0.3),
    **by(learned, learning_rate=0.1, learning_rate_decay=200, adam_epsilon=0.1, inner_learning_rate=0.5),
    **by(learned, clip=0.01, epochs=2, minibatch_tasks=2),
    **by(learned, needs={"learning_rate_decay": 100}, learning_rate_end=0.5),
    **by(learned, needs={"adam_epsilon": 1.0}, max_gradient_norm=1e-4),
    **by(config_fields.made, step_mode="compile", autocast=None),
    **by(rows_of_a_worker, tasks_per_worker=3, unroll_length=5, inner_steps=2),
    **by(evaluated, evaluation_tasks=3, evaluation_inner_steps=2),
    **by(config_fields.network, hidden_sizes=(4, 4), activation="elu", initial_std=0.5),
}


def test_every_field_changes_something():
    assert {*FIELDS, "device", "devices", "inputs"} == {
        field.name for field in dataclasses.fields(MAMLConfig)
    }
    assert config_fields.unchanged(MAML(dataclasses.replace(SMALL, tasks_per_worker=2)), SPEC, FIELDS) == []


@pytest.mark.release
def test_one_inner_step_improves_the_return_in_new_tasks(tmp_path):
    steps = {"max_env_steps": 160_000, "evaluate_period": 160_000}
    config = RunConfig(envs_per_actor=20, directory=str(tmp_path), seed=103, **steps)
    agent = MAML(MAMLConfig(tasks_per_worker=5, unroll_length=40, evaluation_tasks=8))
    launch.launch(make_program(agent, Short, config), engine="serial")
    row = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if row["label"] == "evaluator"][-1]
    assert row["episodes"] == 160
    assert row["episode_return"] > row["return_before"] + 3  # From about -13 to -4.
    result = evaluate(load_policy(tmp_path, allow=[__name__]), episodes=5, envs=20, seed=7)
    assert result["episodes"] == 5 * 8 and result["mean"] > result["mean_return_before"] + 3


def test_nested_actions():
    environment = InParts(20)
    agent = MAML(dataclasses.replace(SMALL, unroll_length=40, tasks_per_worker=2, initial_std=0.5))
    torch.manual_seed(0)
    networks = agent.make_networks(environment.spec)
    assert all((part.log_std == np.log(0.5)).all() for part in networks.head.heads)
    policy = agent.make_policy(networks)
    timestep = environment.reset()
    action, extras, _ = policy.step(timestep.observation, policy.initial_state(20))
    assert action.keys() == {"x", "y"} and action["x"].shape == (20, 1)
    drawn = torch.from_numpy(extras["action"])
    expected = networks(torch.from_numpy(timestep.observation)).log_prob(drawn)
    torch.testing.assert_close(torch.from_numpy(extras["log_prob"]), expected)
    program = make_program(
        agent, InParts, RunConfig(envs_per_actor=5, max_env_steps=4_000, evaluate_period=4_000)
    )
    result = launch.launch(program, engine="serial")
    assert result["learner_steps"] > 1 and np.isfinite(result["episode_return"])
