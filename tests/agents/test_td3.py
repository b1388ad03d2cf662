"""TD3 and DDPG: the losses are those of the papers, and what is explored."""

import dataclasses

import numpy as np
import pytest
import torch
from agent_batches import CENTRE, CONTINUOUS, SCALE, learn, make_learner, make_policy, transitions
from agent_cases import SMALL
from config_fields import learned

from agents.td3 import TD3
from framework.types import Transition

SMALL_TD3, SMALL_DDPG = SMALL["td3"].config, SMALL["ddpg"].config


def test_ddpg_is_td3_with_one_critic_no_delay_and_no_smoothing():
    same = dataclasses.replace(
        SMALL_TD3, num_critics=1, actor_delay=1, target_update_period=1, smoothing_std=0.0
    )
    np.testing.assert_array_equal(learned(SMALL["ddpg"], CONTINUOUS), learned(TD3(same), CONTINUOUS))
    assert dataclasses.asdict(SMALL_DDPG) == dataclasses.asdict(same)


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("name", ["td3", "ddpg"])
def test_the_losses_against_a_loop(name, prioritized):
    """Prioritized replay weighs the loss of the critics only, and gets their mean error."""
    changes = {"prioritized": prioritized, "importance_sampling_exponent": 0.5}
    config = dataclasses.replace(SMALL[name].config, discount=0.9, actor_delay=1, **changes)
    learner, batch = make_learner(type(SMALL[name])(config), CONTINUOUS), transitions(CONTINUOUS)
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
    probability = batch.info.probability
    weights = np.sqrt(probability.min() / probability) if prioritized else np.ones(16)
    critic, actor, priorities = 0.0, 0.0, []
    with torch.no_grad():
        for i in range(16):
            following = targets["policy"](data.next_observation[i])
            for d in range(2):
                disturbance = min(max(0.2 * float(noise[i, d]), -0.5), 0.5)
                following[d] = min(max(float(following[d]) + disturbance, -1.0), 1.0)
            least = min(targets["critics"](data.next_observation[i], following).tolist())
            target = float(data.reward[i]) + 0.9 * float(data.discount[i]) * least
            values = nets.critics(data.observation[i], (data.action[i] - CENTRE) / SCALE).tolist()
            critic += weights[i] * sum(0.5 * (value - target) ** 2 for value in values) / 16
            priorities.append(np.mean([abs(value - target) for value in values]))
            own = nets.critics(data.observation[i], nets.policy(data.observation[i]))
            actor -= float(own[0]) / 16
    result = learn(learner, batch)
    assert result.metrics["critic_loss"].item() == pytest.approx(critic, rel=1e-4)
    assert result.metrics["actor_loss"].item() == pytest.approx(actor, rel=1e-4)
    assert result.metrics["loss"].item() == pytest.approx(critic + actor, rel=1e-4)
    if prioritized:
        assert result.metrics["importance_weight"].item() == pytest.approx(weights.mean(), rel=1e-4)
        assert result.priorities.tolist() == pytest.approx(priorities, rel=1e-4)
    else:
        assert result.priorities is None


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_the_critics_gradient_is_that_of_their_own_loss(name):
    """The policy's loss goes through the critics, and leaves nothing there."""
    gradients = []
    for delay in (1, 2):
        config = dataclasses.replace(SMALL[name].config, actor_delay=delay)
        learner = make_learner(type(SMALL[name])(config), CONTINUOUS)
        learn(learner, transitions(CONTINUOUS))
        gradients.append([p.grad for p in learner.networks.critics.parameters()])
        due = [p.grad is not None for p in learner.networks.policy.parameters()]
        assert all(due) if delay == 1 else not any(due)
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


def test_the_policy_and_the_targets_move_together_and_less_often():
    learner, moved = (
        make_learner(TD3(dataclasses.replace(SMALL_TD3, actor_delay=3, target_update_period=3)), CONTINUOUS),
        [],
    )
    for seed in range(6):
        modules = (learner.networks.policy, learner.targets["policy"], learner.targets["critics"])
        before = [[p.detach().clone() for p in module.parameters()] for module in modules]
        learn(learner, transitions(CONTINUOUS, seed))
        moved.append(
            [
                any(not old.equal(new) for old, new in zip(olds, module.parameters(), strict=True))
                for olds, module in zip(before, modules, strict=True)
            ]
        )
    assert moved == 2 * [[False] * 3, [False] * 3, [True] * 3]


def noises(config, envs, steps):
    """What is added to the first policy's actions, in units of half the range: `[steps, envs, 2]`."""
    agent = TD3(config)
    policy, greedy = make_policy(agent, CONTINUOUS), make_policy(agent, CONTINUOUS, evaluation=True)
    observation, state = np.zeros((envs, 4), np.float32), policy.initial_state(envs)
    added = []
    for _ in range(steps):
        action, extras, state = policy.step(observation, state)
        assert extras == ()
        added.append((action - greedy.step(observation, ())[0]) / np.array([2.0, 0.5]))
    return np.stack(added)


def test_the_noise_is_white_and_equal_for_all_envs():
    added = noises(SMALL_TD3, 200, 20)
    assert make_policy(SMALL["td3"], CONTINUOUS).initial_state(3) == ()
    assert added.std() == pytest.approx(0.1, rel=0.1) and abs(added.mean()) < 0.01
    assert abs((added[1:] * added[:-1]).mean()) < 0.1 * 0.1**2


def test_correlated_noise_keeps_its_spread_and_forgets_at_the_config_s_rate():
    config = dataclasses.replace(SMALL_TD3, exploration_correlation=0.85)
    added = noises(config, 400, 60)[30:]  # It begins at 0.
    assert added.std() == pytest.approx(0.1, rel=0.1)
    for lag in (1, 4):
        correlation = (added[lag:] * added[:-lag]).mean() / (added**2).mean()
        assert correlation == pytest.approx(0.85**lag, abs=0.1)


def test_the_ladder_gives_each_env_a_noise_of_its_own():
    config = dataclasses.replace(SMALL_TD3, exploration_ladder=4.0, exploration_std=0.02)
    stds = noises(config, 3, 2000).std((0, 2))
    np.testing.assert_allclose(stds, [0.02, 0.06, 0.1], rtol=0.15)


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_actions_are_uniform_until_the_first_learner_step_and_greedy_in_evaluations(name):
    observation = np.zeros((2000, 4), np.float32)
    uniform, learned = (
        make_policy(SMALL[name], CONTINUOUS, version=version).step(observation, ())[0] for version in (0, 1)
    )
    np.testing.assert_allclose(uniform.mean(0), [0.0, 0.5], atol=0.15)
    np.testing.assert_allclose(uniform.std(0), [2 / 3**0.5, 0.5 / 3**0.5], rtol=0.1)
    assert learned.std(0)[0] < 0.8 * uniform.std(0)[0]
    for version in (0, 1):
        greedy = make_policy(SMALL[name], CONTINUOUS, True, version).step(observation, ())[0]
        np.testing.assert_allclose(greedy, np.broadcast_to(greedy[:1], greedy.shape), atol=1e-6)
