"""MPO: its loss is that of the papers."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from agent_batches import CENTRE, CONTINUOUS, SCALE, apart, learn, make_learner, project, transitions
from agent_cases import SMALL
from torch.distributions import Independent, Normal, kl_divergence

from agents.mpo import MPO
from framework.types import Transition

SMALL_MPO = SMALL["mpo"].config


@pytest.mark.parametrize("num_atoms", [1, 5])
@pytest.mark.parametrize("penalty", [None, 0.02])
def test_the_loss_against_a_second_formulation(num_atoms, penalty):
    config = dataclasses.replace(
        SMALL_MPO, discount=0.9, num_atoms=num_atoms, v_min=-4.0, v_max=4.0, initial_temperature=0.5,
        epsilon_penalty=penalty, num_samples=6, initial_std=1.5, epsilon_mean=0.01, epsilon_std=0.02,
    )  # fmt: skip
    learner, batch = apart(make_learner(MPO(config), CONTINUOUS)), transitions(CONTINUOUS)
    data = Transition(*(torch.as_tensor(leaf) for leaf in batch.data[:5]))
    state = learner._generator.get_state()
    next_noise, noise = (torch.empty(16, 6, 2).normal_(generator=learner._generator) for _ in range(2))
    learner._generator.set_state(state)
    nets, targets = learner.networks, learner.targets
    atoms = np.linspace(-4.0, 4.0, num_atoms).tolist()
    taken = (data.action - CENTRE) / SCALE
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


def test_the_multipliers_grow_while_the_policy_is_too_far_from_its_target():
    learner = apart(
        make_learner(MPO(dataclasses.replace(SMALL_MPO, epsilon_mean=1e-9, epsilon_std=1e3)), CONTINUOUS)
    )
    before = {n: p.detach().clone() for n, p in learner.networks.duals.named_parameters()}
    learn(learner, transitions(CONTINUOUS))
    after = dict(learner.networks.duals.named_parameters())
    assert (after["mean_multiplier"] > before["mean_multiplier"]).all()
    assert (after["std_multiplier"] < before["std_multiplier"]).all()


def test_multipliers_of_constraints_that_hold_have_a_floor():
    """Acme's: from softplus(-21.6) it takes 25,317 steps to respond to a divergence, not 1,126."""
    learner = make_learner(MPO(SMALL_MPO), CONTINUOUS)
    duals = dict(learner.networks.duals.named_parameters())
    with torch.no_grad():
        for dual in duals.values():
            dual.fill_(-21.6)
    learn(learner, transitions(CONTINUOUS))
    assert {name: dual.min().item() for name, dual in duals.items()} == dict.fromkeys(duals, -18.0)
    assert all(p.min() > -18 for p in learner.networks.policy.parameters())
