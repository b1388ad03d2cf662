"""MPO: every field of its config changes something, and its loss is that of the papers."""

import dataclasses
import math

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
    SPEC,
    acted,
    learned,
    make_batch,
    make_learner,
    make_spec,
    network,
    table,
    written,
)
from torch.distributions import Independent, Normal, kl_divergence

import launch
from agents.mpo import MPO, MPOConfig
from framework.programs import RunConfig, make_program
from framework.types import Transition

AGENT_OF[MPOConfig] = MPO
SMALL = MPOConfig(hidden_sizes=(8, 8), batch_size=16)
ATOMS = {"num_atoms": 11}

# See helpers/config_fields.py.
FIELDS = {
    **config_fields.of_gradients(learned, make_learner),
    **config_fields.of_replay(learned, table),
    "n_step": (3, written, {"n_step": 1}),
    "reward_clip": (0.1, written, {"n_step": 1}),
    "critic_learning_rate": (1e-2, learned, {}),
    "target_update_rate": (0.5, learned, {"target_update_period": 1}),
    "num_atoms": (11, network, {}),
    "v_min": (-3.0, learned, ATOMS),
    "v_max": (3.0, learned, ATOMS),
    "num_samples": (5, learned, {}),
    "epsilon": (0.5, learned, {"initial_temperature": 0.1}),
    "epsilon_penalty": (None, learned, {}),
    "initial_temperature": (1.0, learned, {}),
    "epsilon_mean": (1e-6, learned, {"learning_rate": 1e-2}),
    "epsilon_std": (1e-2, learned, {"learning_rate": 1e-2}),
    "initial_mean_multiplier": (1.0, learned, {}),
    "initial_std_multiplier": (1.0, learned, {}),
    "dual_learning_rate": (1e-1, learned, {}),
    "hidden_sizes": ((8,), network, {}),
    "layer_norm": (False, network, {}),
    "initial_std": (0.1, acted, {}),
}


def test_every_field_is_in_the_table():
    config_fields.assert_complete(FIELDS, MPOConfig)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_something(field):
    config_fields.assert_changes_something(FIELDS, field, SMALL)


WRONG = [
    ("num_atoms", 0),
    ("num_atoms", 2.5),
    ("v_min", 150.0),
    ("num_samples", 1),
    ("epsilon", 0.0),
    ("epsilon", 3.0),  # log 20 is 2.996
    ("epsilon_penalty", 0.0),
    ("epsilon_penalty", 3.0),
    ("epsilon_mean", -1.0),
    ("epsilon_std", 0.0),
    ("initial_temperature", 0.0),
    ("initial_mean_multiplier", 0.0),
    ("initial_std_multiplier", math.inf),
    ("initial_std", 0.0),
    ("critic_learning_rate", -1.0),
    ("dual_learning_rate", -1.0),
    ("hidden_sizes", (8, 0)),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_value_that_makes_no_sense_is_refused(field, value):
    config_fields.assert_refuses(MPOConfig, field, value)


def test_the_learner_goes_to_the_configured_device():
    config_fields.assert_learns_on_the_device(make_learner, SMALL, make_batch())


def parted(config, actions=CONTINUOUS):
    """A learner whose target networks differ from its networks."""
    learner = make_learner(config, actions)
    with torch.no_grad():
        for parameter in learner.targets.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return learner


def project(probabilities, reward, discount, atoms):
    """The distribution of `reward + discount * atom` on the atoms, one by one."""
    result, width = [0.0] * len(atoms), atoms[1] - atoms[0]
    for probability, atom in zip(probabilities, atoms, strict=True):
        value = min(max(reward + discount * atom, atoms[0]), atoms[-1])
        for i, other in enumerate(atoms):
            result[i] += probability * max(0.0, 1.0 - abs(value - other) / width)
    return result


@pytest.mark.parametrize("num_atoms", [1, 5])
@pytest.mark.parametrize("penalty", [None, 0.02])
def test_the_loss_against_a_second_formulation(num_atoms, penalty):
    config = dataclasses.replace(
        SMALL, discount=0.9, num_atoms=num_atoms, v_min=-4.0, v_max=4.0, initial_temperature=0.5,
        epsilon_penalty=penalty, num_samples=6, initial_std=1.5, epsilon_mean=0.01, epsilon_std=0.02,
    )  # fmt: skip
    learner, batch = parted(config), make_batch()
    data = Transition(*(torch.as_tensor(leaf) for leaf in batch.data[:5]))
    state = learner._generator.get_state()
    next_noise, noise = (torch.empty(16, 6, 2).normal_(generator=learner._generator) for _ in range(2))
    learner._generator.set_state(state)
    nets, targets = learner.networks, learner.targets
    atoms = np.linspace(-4.0, 4.0, num_atoms).tolist()
    taken = (data.action - torch.tensor([0.0, 0.5])) / torch.tensor([2.0, 0.5])
    critic, tempered, outside, fit, kl_mean, kl_std = 0.0, [], [], [], [], []

    def rated(observation, noise):
        """The target policy, its actions, and for them the chances of the atoms, if any, and values."""
        policy = targets["policy"](observation)
        actions = policy.mean + policy.log_std.exp() * noise
        outputs = [targets["critics"](observation, action.clamp(-1, 1))[0] for action in actions]
        if num_atoms == 1:
            return policy, actions, None, np.array(outputs)
        chances = torch.stack(outputs).softmax(-1).numpy()
        return policy, actions, chances, chances @ np.array(atoms)

    with torch.no_grad():
        for i in range(16):
            _, _, chances, values = rated(data.next_observation[i], next_noise[i])
            reward, discount = float(data.reward[i]), 0.9 * float(data.discount[i])
            own = nets.critics(data.observation[i], taken[i])[0]
            if num_atoms == 1:
                critic += 0.5 * (float(own) - reward - discount * values.mean()) ** 2 / 16
            else:
                target = project(chances.mean(0).tolist(), reward, discount, atoms)
                logs = own.log_softmax(-1).tolist()
                critic -= sum(p * log for p, log in zip(target, logs, strict=True)) / 16
            old, actions, _, values = rated(data.observation[i], noise[i])
            new = nets.policy(data.observation[i])
            tempered.append(math.log(np.mean(np.exp(values / 0.5))))
            weights = np.exp(values / 0.5) / np.exp(values / 0.5).sum()
            if penalty is not None:
                costs = np.array([-math.dist(action, action.clamp(-1, 1)) for action in actions])
                outside.append(math.log(np.mean(np.exp(costs))))
                weights = weights + np.exp(costs) / np.exp(costs).sum()
            old_std, new_std = old.log_std.exp(), new.log_std.exp()
            for mean, std in ((new.mean, old_std), (old.mean, new_std)):
                logs = Independent(Normal(mean, std), 1).log_prob(actions)
                fit.append(-sum(w * log for w, log in zip(weights.tolist(), logs.tolist(), strict=True)))
            base = Normal(old.mean, old_std)
            kl_mean.append(kl_divergence(base, Normal(new.mean, old_std)).tolist())
            kl_std.append(kl_divergence(base, Normal(old.mean, new_std)).tolist())
    policy = 0.5 * (0.1 + np.mean(tempered)) + sum(fit) / 16
    if penalty is not None:
        policy += penalty + np.mean(outside)
    for kl, multiplier, epsilon in ((kl_mean, 10.0, 0.01), (kl_std, 1000.0, 0.02)):
        each = np.mean(kl, axis=0)
        policy += multiplier * each.sum() + multiplier * (epsilon - each).sum()
    metrics = learn(learner, batch).metrics
    assert metrics["critic_loss"].item() == pytest.approx(critic, rel=1e-4)
    assert metrics["loss"].item() == pytest.approx(critic + policy, rel=1e-4)
    assert metrics["kl_mean"].item() == pytest.approx(np.mean(kl_mean), rel=1e-3)
    assert metrics["kl_std"].item() == pytest.approx(np.mean(kl_std), rel=1e-3)


def test_each_loss_moves_its_own_parameters_only():
    still = {"learning_rate": 0.0, "critic_learning_rate": 0.0, "dual_learning_rate": 0.0}
    for field, child in zip(still, ("policy", "critics", "duals"), strict=True):
        learner = parted(dataclasses.replace(SMALL, **{**still, field: 1e-2}))
        before = {n: p.detach().clone() for n, p in learner.networks.named_parameters()}
        learn(learner, make_batch())
        moved = {n.split(".")[0] for n, p in learner.networks.named_parameters() if not p.equal(before[n])}
        assert moved == {child}


def test_the_multipliers_grow_while_the_policy_is_too_far_from_its_target():
    learner = parted(dataclasses.replace(SMALL, epsilon_mean=1e-9, epsilon_std=1e3))
    before = {n: p.detach().clone() for n, p in learner.networks.duals.named_parameters()}
    learn(learner, make_batch())
    after = dict(learner.networks.duals.named_parameters())
    assert (after["mean_multiplier"] > before["mean_multiplier"]).all()
    assert (after["std_multiplier"] < before["std_multiplier"]).all()


@pytest.mark.parametrize("actions", SHAPES.values(), ids=SHAPES)
def test_learns_and_acts_with_every_shape_of_bounded_action(actions):
    learner = make_learner(SMALL, actions)
    for seed in range(2):
        metrics = learn(learner, make_batch(seed, actions=actions)).metrics
        assert all(np.isfinite(float(value)) for value in metrics.values())
    observation = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    for evaluation in (True, False):
        taken, extras, _ = MPO(SMALL).make_policy(learner.networks, evaluation).step(observation, ())
        assert extras == () and taken.shape == (64, *actions.shape) and taken.dtype == actions.dtype
        for action in taken:
            actions.validate(action)


def test_evaluation_takes_the_mean_and_acting_repeats_from_its_seed():
    nets = MPO(SMALL).make_networks(SPEC)
    greedy, policy = MPO(SMALL).make_policy(nets, evaluation=True), MPO(SMALL).make_policy(nets)
    observation = np.zeros((500, 4), np.float32)
    assert np.unique(greedy.step(observation, ())[0], axis=0).shape[0] == 1
    policy.seed(3)
    first = policy.step(observation, ())[0]
    policy.seed(3)
    np.testing.assert_array_equal(policy.step(observation, ())[0], first)
    assert first.std(0).min() > 0.1


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (DISCRETE, "expected bounded real numbers or a nest of them for MPO"),
        (dm_specs.Array((2,), np.float32), "expected bounded real numbers or a nest of them for MPO"),
        (
            dm_specs.BoundedArray((2,), np.int64, 0, 4),
            "expected bounded real numbers or a nest of them for MPO",
        ),
        (dm_specs.BoundedArray((2,), np.float32, -np.inf, 1), "finite bounds"),
    ],
)
def test_actions_that_do_not_fit_are_refused(actions, message):
    with pytest.raises(ValueError, match=message):
        MPO(SMALL).make_networks(make_spec(actions))


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_program_with_a_distributional_critic_runs_on_the_engine(engine):
    config = MPOConfig(**ATOMS, hidden_sizes=(8,), batch_size=8, samples_per_insert=8.0, min_replay_size=32)
    run = RunConfig(num_actors=2, envs_per_actor=2, max_env_steps=200, evaluate_period=None)
    result = launch.launch(make_program(MPO(config), "gymnasium:Pendulum-v1", run), engine=engine)
    assert result["reason"] == "max_env_steps" and result["learner_steps"] > 10
