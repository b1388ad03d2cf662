"""TD3 and DDPG: every field changes something, the losses are those of the papers, and what is explored."""

import dataclasses

import agent_probes
import config_fields
import numpy as np
import pytest
import torch
from batches import learn
from dm_env import specs as dm_specs
from test_sac import (
    AGENT_OF,
    CONTINUOUS,
    DISCRETE,
    SHAPES,
    acted,
    learned,
    make_batch,
    make_learner,
    make_spec,
    network,
    table,
    written,
)

from agents.td3 import DDPG, TD3, DDPGConfig, TD3Config
from framework.core import Progress
from framework.programs import make_agent
from framework.types import Transition

AGENT_OF |= {TD3Config: TD3, DDPGConfig: DDPG}
SETTINGS = {"hidden_sizes": (8, 8), "batch_size": 16}
SMALL, SMALL_DDPG = TD3Config(**SETTINGS), DDPGConfig(**SETTINGS)
NOISY = {"random_start": False}


def make_uneven_batch(seed=0):
    """Items that were drawn with unequal probabilities."""
    batch = make_batch(seed)
    probability = np.random.default_rng(seed).dirichlet(np.ones(16))
    return batch._replace(info=batch.info._replace(probability=probability))


def weighted(config):
    learner = make_learner(config)
    return learn(learner, make_uneven_batch()).metrics["loss"].item()


# See helpers/config_fields.py.
FIELDS = {
    **config_fields.of_gradients(learned, make_learner),
    **config_fields.of_replay(learned, table),
    "n_step": (3, written, {}),
    "reward_clip": (0.1, written, {}),
    "prioritized": (True, table, {}),
    "priority_exponent": (0.3, table, {"prioritized": True}),
    "importance_sampling_exponent": (0.9, weighted, {"prioritized": True}),
    "critic_learning_rate": (1e-2, learned, {}),
    "num_critics": (3, network, {}),
    "actor_delay": (3, learned, {}),
    "target_update_period": (3, learned, {}),
    "smoothing_std": (0.1, learned, {}),
    "smoothing_clip": (0.1, learned, {"smoothing_std": 1.0}),
    "random_start": (False, acted, {}),
    "exploration_std": (0.3, acted, NOISY),
    "exploration_correlation": (0.85, acted, NOISY),
    "exploration_ladder": (2.0, acted, NOISY),
    "hidden_sizes": ((8,), network, {}),
    "layer_norm": (True, network, {}),
}
CASES = [(config, field) for config in (SMALL, SMALL_DDPG) for field in FIELDS]


def test_every_field_is_in_the_table():
    config_fields.assert_complete(FIELDS, TD3Config)
    config_fields.assert_complete(FIELDS, DDPGConfig)


@pytest.mark.parametrize("config, field", CASES, ids=[f"{type(c).__name__}-{f}" for c, f in CASES])
def test_every_field_changes_something(config, field):
    config_fields.assert_changes_something(FIELDS, field, config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_critics", 0),
        ("actor_delay", 0),
        ("hidden_sizes", (8, -1)),
        ("critic_learning_rate", -1.0),
        ("smoothing_std", -0.1),
        ("smoothing_clip", 0.0),
        ("exploration_std", -0.1),
        ("exploration_correlation", 1.0),
        ("exploration_correlation", 1.5),
        ("exploration_ladder", -1.0),
        ("priority_exponent", -1.0),
        ("importance_sampling_exponent", 1.5),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(field, value):
    config_fields.assert_refuses(TD3Config, field, value)


@pytest.mark.parametrize("part", ["policy", "critics"])
@pytest.mark.parametrize("name", ["td3", "ddpg", "d4pg", "recurrent_td3", "td7"])
def test_all_hidden_layers_are_normalized_or_none(name, part):
    def layers(layer_norm):
        agent = make_agent(name, layer_norm=layer_norm, num_critics=1)
        module = getattr(agent.make_networks(make_spec(CONTINUOUS)), part)
        return [each.normalized_shape for each in module.modules() if isinstance(each, torch.nn.LayerNorm)]

    assert layers(True) == [(256,), (256,)]
    assert layers(False) == []


def test_the_learner_goes_to_the_configured_device():
    config_fields.assert_learns_on_the_device(make_learner, SMALL, make_batch())


def test_ddpg_is_td3_with_one_critic_no_delay_and_no_smoothing():
    same = TD3Config(**SETTINGS, num_critics=1, actor_delay=1, target_update_period=1, smoothing_std=0.0)
    np.testing.assert_array_equal(learned(SMALL_DDPG), learned(same))
    assert dataclasses.asdict(SMALL_DDPG) == dataclasses.asdict(same)


@pytest.mark.parametrize("config", [SMALL, SMALL_DDPG], ids=["td3", "ddpg"])
def test_the_losses_against_a_loop(config):
    config = dataclasses.replace(config, discount=0.9, actor_delay=1)
    learner, batch = make_learner(config), make_batch()
    nets, targets = learner.networks, learner.targets
    # The first policy hardly differs from its target: move the targets away.
    for parameter in targets.parameters():
        parameter += 0.1 * torch.ones_like(parameter)
    state = learner._generator.get_state()
    noise = torch.empty(16, 2).normal_(generator=learner._generator)
    if not config.smoothing_std:
        noise = torch.zeros(16, 2)
    learner._generator.set_state(state)
    data = Transition(*(torch.as_tensor(leaf) for leaf in batch.data[:5]))
    scale, centre = torch.tensor([2.0, 0.5]), torch.tensor([0.0, 0.5])
    critic = actor = 0.0
    with torch.no_grad():
        for i in range(16):
            following = targets["policy"](data.next_observation[i])
            for d in range(2):
                disturbance = min(max(0.2 * float(noise[i, d]), -0.5), 0.5)
                following[d] = min(max(float(following[d]) + disturbance, -1.0), 1.0)
            least = min(targets["critics"](data.next_observation[i], following).tolist())
            target = float(data.reward[i]) + 0.9 * float(data.discount[i]) * least
            values = nets.critics(data.observation[i], (data.action[i] - centre) / scale).tolist()
            critic += sum(0.5 * (value - target) ** 2 for value in values) / 16
            own = nets.critics(data.observation[i], nets.policy(data.observation[i]))
            actor -= float(own[0]) / 16
    metrics = learn(learner, batch).metrics
    assert metrics["critic_loss"].item() == pytest.approx(critic, rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(actor, rel=1e-4)
    assert metrics["loss"].item() == pytest.approx(critic + actor, rel=1e-4)


@pytest.mark.parametrize("config", [SMALL, SMALL_DDPG], ids=["td3", "ddpg"])
def test_each_loss_moves_its_own_parameters_only(config):
    for field, child in (("learning_rate", "policy"), ("critic_learning_rate", "critics")):
        rates = {"learning_rate": 0.0, "critic_learning_rate": 0.0, "actor_delay": 1, field: 1e-2}
        learner = make_learner(dataclasses.replace(config, **rates))
        before = {name: p.detach().clone() for name, p in learner.networks.named_parameters()}
        learn(learner, make_batch())
        moved = {n.split(".")[0] for n, p in learner.networks.named_parameters() if not p.equal(before[n])}
        assert moved == {child}
        assert all(p.requires_grad for p in learner.networks.parameters())


def test_the_critics_gradient_is_that_of_their_own_loss():
    """The policy's loss goes through the critics, and leaves nothing there."""
    gradients = []
    for delay in (1, 2):
        learner = make_learner(dataclasses.replace(SMALL, actor_delay=delay))
        learn(learner, make_batch())
        gradients.append([p.grad for p in learner.networks.critics.parameters()])
        due = [p.grad is not None for p in learner.networks.policy.parameters()]
        assert all(due) if delay == 1 else not any(due)
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


def test_the_policy_and_the_targets_move_together_and_less_often():
    learner, moved = make_learner(dataclasses.replace(SMALL, actor_delay=3, target_update_period=3)), []
    for seed in range(6):
        modules = (learner.networks.policy, learner.targets["policy"], learner.targets["critics"])
        before = [[p.detach().clone() for p in module.parameters()] for module in modules]
        learn(learner, make_batch(seed))
        moved.append(
            [
                any(not old.equal(new) for old, new in zip(olds, module.parameters(), strict=True))
                for olds, module in zip(before, modules, strict=True)
            ]
        )
    assert moved == 2 * [[False] * 3, [False] * 3, [True] * 3]


def test_prioritized_replay_weighs_the_critics_loss_only_and_gets_the_mean_errors():
    config, batch = dataclasses.replace(SMALL, actor_delay=1), make_uneven_batch()
    plain = learn(make_learner(config), batch)
    config = dataclasses.replace(config, prioritized=True, importance_sampling_exponent=0.5)
    learner = make_learner(config)
    data = Transition(*(torch.as_tensor(leaf) for leaf in batch.data[:5]))
    with torch.no_grad():
        next_actions = learner.targets["policy"](data.next_observation)
        noise = torch.empty(16, 2).normal_(generator=learner._generator.manual_seed(7))
        next_actions = (next_actions + (0.2 * noise).clamp(-0.5, 0.5)).clamp(-1.0, 1.0)
        following = learner.targets["critics"](data.next_observation, next_actions).amin(0)
        actions = (data.action - torch.tensor([0.0, 0.5])) / torch.tensor([2.0, 0.5])
        values = learner.networks.critics(data.observation, actions)
        errors = data.reward + 0.99 * data.discount * following - values
    learner._generator.manual_seed(7)
    result = learn(learner, batch)
    weights = torch.tensor(1.0 / np.sqrt(batch.info.probability / batch.info.probability.min()))
    assert result.metrics["importance_weight"].item() == pytest.approx(weights.mean().item(), rel=1e-4)
    expected = (weights * 0.5 * errors.square().sum(0)).mean()
    assert result.metrics["critic_loss"].item() == pytest.approx(expected.item(), rel=1e-4)
    assert result.priorities.tolist() == pytest.approx(errors.abs().mean(0).tolist(), rel=1e-4)
    assert plain.priorities is None
    assert result.metrics["actor_loss"].item() == plain.metrics["actor_loss"].item()


def make_policy(config=SMALL, evaluation=False, version=1, actions=CONTINUOUS):
    torch.manual_seed(0)
    agent = AGENT_OF[type(config)](config)
    policy = agent.make_policy(agent.make_networks(make_spec(actions)), evaluation)
    policy.progress = Progress(version=version)
    return policy


def noises(config, envs, steps):
    """What is added to the first policy's actions, in units of half the range: `[steps, envs, 2]`."""
    policy, greedy = make_policy(config), make_policy(config, evaluation=True)
    observation, state = np.zeros((envs, 4), np.float32), policy.initial_state(envs)
    added = []
    for _ in range(steps):
        action, extras, state = policy.step(observation, state)
        assert extras == ()
        added.append((action - greedy.step(observation, ())[0]) / np.array([2.0, 0.5]))
    return np.stack(added)


def test_the_noise_is_white_and_equal_for_all_envs():
    added = noises(SMALL, 200, 20)
    assert make_policy().initial_state(3) == ()
    assert added.std() == pytest.approx(0.1, rel=0.1) and abs(added.mean()) < 0.01
    assert abs((added[1:] * added[:-1]).mean()) < 0.1 * 0.1**2


def test_correlated_noise_keeps_its_spread_and_forgets_at_the_config_s_rate():
    config = dataclasses.replace(SMALL, exploration_correlation=0.85)
    added = noises(config, 400, 60)[30:]  # It begins at 0.
    assert added.std() == pytest.approx(0.1, rel=0.1)
    for lag in (1, 4):
        correlation = (added[lag:] * added[:-lag]).mean() / (added**2).mean()
        assert correlation == pytest.approx(0.85**lag, abs=0.1)


def test_the_ladder_gives_each_env_a_noise_of_its_own():
    config = dataclasses.replace(SMALL, exploration_ladder=4.0, exploration_std=0.02)
    stds = noises(config, 3, 2000).std((0, 2))
    np.testing.assert_allclose(stds, [0.02, 0.06, 0.1], rtol=0.15)


def test_actions_are_uniform_until_the_first_learner_step_and_greedy_in_evaluations():
    observation = np.zeros((2000, 4), np.float32)
    uniform = make_policy(version=0).step(observation, ())[0]
    np.testing.assert_allclose(uniform.mean(0), [0.0, 0.5], atol=0.15)
    np.testing.assert_allclose(uniform.std(0), [2 / 3**0.5, 0.5 / 3**0.5], rtol=0.1)
    for version in (0, 1):
        greedy = make_policy(evaluation=True, version=version).step(observation, ())[0]
        np.testing.assert_allclose(greedy, np.broadcast_to(greedy[:1], greedy.shape), atol=1e-6)


def test_actions_repeat_from_seed_and_state():
    first, second = make_policy(), make_policy()
    observation = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    for policy in (first, second):
        policy.seed(3)
    np.testing.assert_array_equal(first.step(observation, ())[0], second.step(observation, ())[0])
    second.restore(first.save())
    np.testing.assert_array_equal(first.step(observation, ())[0], second.step(observation, ())[0])
    second.seed(4)
    assert (first.step(observation, ())[0] != second.step(observation, ())[0]).any()


@pytest.mark.parametrize("actions", SHAPES.values(), ids=SHAPES)
def test_learns_and_acts_with_every_shape_of_bounded_action(actions):
    learner = make_learner(SMALL, actions)
    for seed in range(3):
        metrics = learn(learner, make_batch(seed, actions=actions)).metrics
        assert all(np.isfinite(float(value)) for value in metrics.values())
    observation = 100 * np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    wide = dataclasses.replace(SMALL, exploration_std=3.0)
    for version, evaluation in ((0, False), (1, False), (1, True)):
        taken = make_policy(wide, evaluation, version, actions).step(observation, ())[0]
        assert taken.shape == (64, *actions.shape) and taken.dtype == actions.dtype
        for action in taken:
            actions.validate(action)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (DISCRETE, r"bounded real numbers or a nest of them for TD3"),
        (dm_specs.Array((2,), np.float32), r"bounded real numbers"),
        ({"a": CONTINUOUS, "b": DISCRETE}, r"bounded real numbers.*PPO"),
        (dm_specs.BoundedArray((2,), np.float32, 1, 1), r"some of them not equal"),
        (dm_specs.BoundedArray((2,), np.int64, 0, 4), r"bounded real numbers"),
    ],
)
def test_actions_that_do_not_fit_are_refused(actions, message):
    with pytest.raises(ValueError, match=message):
        TD3(SMALL).make_networks(make_spec(actions))


def test_a_saved_learner_continues_with_the_same_parameters():
    whole, first, second = (make_learner(SMALL) for _ in range(3))
    for seed in range(6):
        learn(whole, make_batch(seed))
        learn(first if seed < 3 else second, make_batch(seed))
        if seed == 2:
            second.restore(first.save())
    for one, other in zip(whole.networks.parameters(), second.networks.parameters(), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize(
    "engine, settings",
    [
        ("serial", {"replay_shards": 2}),
        ("threads", {"inference": "alternating"}),
        ("processes", {"inference": "server"}),
    ],
    ids=["serial", "threads", "processes"],
)
def test_td3_in_a_program(engine, settings):
    """With correlated noise, whose state stays with its env."""
    config = TD3Config(
        **SETTINGS, min_replay_size=50, samples_per_insert=4.0, exploration_correlation=0.5, n_step=3
    )
    agent_probes.assert_trains_in_a_program(TD3(config), "gymnasium:Pendulum-v1", engine, **settings)
