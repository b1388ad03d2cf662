"""Policy, value, Q-learning and SAC losses against slow loops, closed forms and autograd."""

import functools
import math

import numpy as np
import pytest
import torch

from framework import losses

torch.manual_seed(0)


@pytest.fixture
def random():
    return np.random.default_rng(7)


def tensors(random, *shape, count=1):
    made = [torch.tensor(random.normal(size=shape)) for _ in range(count)]
    return made[0] if count == 1 else made


def test_masked_mean_ignores_what_does_not_count_even_nan(random):
    values = torch.tensor([[1.0, math.nan], [3.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    mean = losses.masked_mean(values, mask)
    mean.backward()
    assert mean.item() == 2.0
    assert values.grad.tolist() == [[0.5, 0.0], [0.5, 0.0]]
    assert losses.masked_mean(values, torch.zeros(2, 2)).item() == 0.0
    with pytest.raises(ValueError, match=r"mask: got shape \(2,\)"):
        losses.masked_mean(values, torch.ones(2))


def test_normalized_advantages_have_unit_moments_over_the_mask(random):
    advantages = tensors(random, 4, 9) * 3 + 2
    mask = torch.tensor(random.random((4, 9)) < 0.6).double()
    normal = losses.normalize_advantages(advantages, mask)
    kept = normal[mask > 0]
    assert kept.mean().item() == pytest.approx(0, abs=1e-9)
    assert kept.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert (normal[mask == 0] == 0).all()


def test_clipped_surrogate_against_a_loop(random):
    new, old, advantages = tensors(random, 3, 5, count=3)
    new, old = new / 3, old / 3
    mask = torch.tensor(random.random((3, 5)) < 0.7).double()
    total = count = outside = kl = 0.0
    for n in range(3):
        for t in range(5):
            if mask[n, t]:
                ratio = math.exp(new[n, t] - old[n, t])
                clipped = min(max(ratio, 0.8), 1.2)
                total -= min(ratio * advantages[n, t].item(), clipped * advantages[n, t].item())
                outside += not 0.8 <= ratio <= 1.2
                kl += ratio - 1 - math.log(ratio)
                count += 1
    result = losses.clipped_surrogate(new, old, advantages, mask, 0.2)
    assert result.loss.item() == pytest.approx(total / count)
    assert result.clip_fraction.item() == pytest.approx(outside / count)
    assert result.kl.item() == pytest.approx(kl / count)


@pytest.mark.parametrize("masked", [True, False])
def test_the_clipped_surrogate_has_the_gradient_that_autograd_gives_its_formula(masked, random):
    new, old, advantages = tensors(random, 3, 5, count=3)
    new, old = new / 3, old / 3
    new[0, 0], old[0, 1], advantages[1, 1] = old[0, 0], new[0, 1], 0.0  # ratios of 1; nothing to gain
    new.requires_grad_()
    mask = torch.tensor(random.random((3, 5)) < 0.7).double() if masked else None
    ratios = (new - old).exp()
    gains = torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
    expected = losses.masked_mean(-gains, mask)
    result = losses.clipped_surrogate(new, old, advantages, mask, 0.2, statistics=False)
    torch.testing.assert_close(result.loss, expected)
    (slope,) = torch.autograd.grad(3 * expected, new, create_graph=True)
    (ours,) = torch.autograd.grad(3 * result.loss, new, create_graph=True)
    torch.testing.assert_close(ours, slope)
    # And of that, as learning to learn needs it.
    (curvature,) = torch.autograd.grad((slope**2).sum(), new)
    assert curvature.abs().sum() > 0
    torch.testing.assert_close(torch.autograd.grad((ours**2).sum(), new)[0], curvature)


def test_the_impact_surrogate_against_a_loop(random):
    new, target, acting, advantages = tensors(random, 3, 5, count=4)
    mask = torch.tensor(random.random((3, 5)) < 0.7).double()
    total = count = bounded = 0.0
    for index in mask.nonzero().tolist():
        pi, pi_target, mu, advantage = (
            each[tuple(index)].item() for each in (new, target, acting, advantages)
        )
        correction = math.exp(mu) / math.exp(pi_target)
        bounded += correction > 2
        ratio = min(correction, 2.0) * math.exp(pi) / math.exp(mu)
        total -= min(ratio * advantage, min(max(ratio, 0.7), 1.3) * advantage)
        count += 1
    assert 0 < bounded < count
    result = losses.impact_surrogate(new, target, acting, advantages, mask, 0.3, 2.0)
    assert result.loss.item() == pytest.approx(total / count)


@pytest.mark.parametrize("kl, penalty", [(0.005, 0.0), (0.02, 0.0), (0.05, 1000 * 0.03**2)])
def test_kl_penalty_with_the_cutoff_above_twice_the_target(kl, penalty, random):
    new, old, advantages = tensors(random, 2, 4, count=3)
    kls = torch.full((2, 4), kl, dtype=torch.float64, requires_grad=True)
    result = losses.kl_penalty_surrogate(new, old, advantages, kls, 3.0, target_kl=0.01)
    expected = -(torch.exp(new - old) * advantages).mean().item() + 3.0 * kl + penalty
    assert result.loss.item() == pytest.approx(expected)
    assert result.kl.item() == pytest.approx(kl)
    result.loss.backward()
    slope = (3.0 + 2000 * max(0.0, kl - 0.02)) / 8
    assert kls.grad.flatten().tolist() == pytest.approx([slope] * 8)


@pytest.mark.parametrize("kl, factor", [(0.0131, 1.5), (0.0129, 1.0), (0.0071, 1.0), (0.0069, 1 / 1.5)])
def test_the_kl_coefficient_moves_outside_of_the_band(kl, factor):
    coefficient = losses.adapt_kl_coefficient(torch.tensor(2.0), torch.tensor(kl), 0.01)
    assert coefficient.item() == pytest.approx(2.0 * factor)
    assert losses.adapt_kl_coefficient(2.0, kl, 0.01).item() == pytest.approx(2.0 * factor)
    assert losses.adapt_kl_coefficient(2.0, torch.tensor(kl), 0.01).item() == pytest.approx(2.0 * factor)


def test_value_losses_against_a_loop(random):
    values, old, targets = tensors(random, 2, 6, count=3)
    mask = torch.tensor([[1.0, 1, 0, 1, 0, 1]] * 2).double()
    plain, clipped = [], []
    for n, t in np.ndindex(2, 6):
        if mask[n, t]:
            v, o, g = values[n, t].item(), old[n, t].item(), targets[n, t].item()
            plain.append(0.5 * (v - g) ** 2)
            near = o + min(max(v - o, -0.3), 0.3)
            clipped.append(0.5 * max((v - g) ** 2, (near - g) ** 2))
    assert losses.value_loss(values, targets, mask).item() == pytest.approx(np.mean(plain))
    result = losses.clipped_value_loss(values, old, targets, mask, 0.3)
    assert result.item() == pytest.approx(np.mean(clipped))


def test_q_learning_by_hand():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    next_values = torch.tensor([[10.0, 20.0], [30.0, 5.0], [7.0, 8.0]])
    selector = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    actions = torch.tensor([0, 1, 0])
    rewards = torch.tensor([1.0, 1.0, 1.0])
    discounts = torch.tensor([0.9, 0.9, 0.0])
    q = losses.q_learning_errors(values, actions, rewards, discounts, next_values)
    assert q.tolist() == pytest.approx([1 + 18 - 1, 1 + 27 - 4, 1 - 5])
    double = losses.double_q_errors(values, actions, rewards, discounts, next_values, selector)
    assert double.tolist() == pytest.approx([1 + 9 - 1, 1 + 4.5 - 4, 1 - 5])


def test_q_learning_moves_the_taken_action_only():
    values = torch.zeros(1, 3, requires_grad=True)
    next_values = torch.ones(1, 3, requires_grad=True)
    error = losses.double_q_errors(
        values, torch.tensor([1]), torch.ones(1), torch.ones(1), next_values, next_values
    )
    losses.huber(error, 10.0).sum().backward()
    assert values.grad.tolist() == [[0.0, -2.0, 0.0]]
    assert next_values.grad is None


@pytest.mark.parametrize("delta", [0.5, 1.0, 3.0])
def test_huber_against_torch(delta):
    errors = torch.linspace(-5, 5, 101, dtype=torch.float64)
    expected = torch.nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=delta)
    np.testing.assert_allclose(losses.huber(errors, delta), expected)


def test_importance_weights_are_at_most_1_and_undo_the_bias():
    probabilities = torch.tensor([0.1, 0.2, 0.7])
    weights = losses.importance_weights(probabilities, 3, 1.0)
    assert weights.max().item() == 1.0
    assert (weights * probabilities).tolist() == pytest.approx([0.1] * 3)
    assert losses.importance_weights(probabilities, 3, 0.0).tolist() == [1.0] * 3
    half = losses.importance_weights(probabilities, torch.full((3,), 3), torch.tensor(0.5))
    assert half.tolist() == pytest.approx([1.0, math.sqrt(0.5), math.sqrt(1 / 7)])
    # Of a part of a batch, elsewhere in which there is a weight of 5.
    part = losses.importance_weights(
        probabilities, 3, 1.0, lambda largest: torch.maximum(largest, torch.tensor(5.0))
    )
    assert part.tolist() == pytest.approx((1 / (3 * probabilities) / 5.0).tolist())


def test_sac_critic_bootstraps_after_a_truncation_only(random):
    # Transitions: running, truncated (discount kept), terminated (discount 0), padding.
    rewards = torch.tensor([1.0, 1.0, 1.0, 9.0])
    discounts = torch.tensor([0.9, 0.9, 0.0, 0.9])
    next_values = torch.tensor([10.0, 10.0, 10.0, math.nan])
    values = torch.stack([torch.zeros(4), torch.full((4,), 2.0)]).requires_grad_()
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0])
    loss = losses.sac_critic_loss(values, rewards, discounts, next_values, mask)
    assert loss.item() == pytest.approx((100 + 64 + 100 + 64 + 1 + 1) / 2 / 3)
    with pytest.raises(ValueError, match="critics"):
        losses.sac_critic_loss(values[0], rewards, discounts, next_values)


def test_the_discrete_sac_losses_are_the_means_of_the_sampled_ones(random):
    logits = tensors(random, 5, 3).requires_grad_()
    q = tensors(random, 5, 3)
    log_probs = logits.log_softmax(-1)
    probabilities = log_probs.exp()
    by_action = losses.soft_value(q, log_probs, 0.3)
    np.testing.assert_allclose(
        losses.discrete_soft_value(q, logits, 0.3).detach(), (probabilities * by_action).sum(-1).detach()
    )
    loss = losses.sac_discrete_actor_loss(logits, q, torch.tensor(0.3, requires_grad=True))
    expected = (probabilities * (0.3 * log_probs - q)).sum(-1).mean()
    assert loss.item() == pytest.approx(expected.item())
    # It is least where pi = softmax(q / temperature): its gradient is zero there.
    best = (q / 0.3).requires_grad_()
    (gradient,) = torch.autograd.grad(losses.sac_discrete_actor_loss(best, q, 0.3), best)
    assert gradient.abs().max() < 1e-12


def test_sac_actor_loss_holds_the_temperature_and_passes_the_actions_gradient(random):
    temperature = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    log_probs, values = tensors(random, 6).requires_grad_(), tensors(random, 6).requires_grad_()
    mask = torch.tensor([1.0, 1, 1, 0, 0, 0]).double()
    losses.sac_actor_loss(log_probs, values, temperature, mask).backward()
    assert temperature.grad is None
    assert log_probs.grad.tolist() == pytest.approx([0.2 / 3] * 3 + [0.0] * 3)
    assert values.grad.tolist() == pytest.approx([-1 / 3] * 3 + [0.0] * 3)


@pytest.mark.parametrize("entropy, grows", [(-2.0, True), (0.0, False)])
def test_the_temperature_grows_while_the_policy_is_too_certain(entropy, grows):
    log_temperature = torch.zeros((), requires_grad=True)
    losses.sac_temperature_loss(log_temperature, torch.full((8,), -entropy), target_entropy=-1.0).backward()
    assert (log_temperature.grad < 0) == grows


def test_the_explained_variance_by_hand():
    targets, mask = torch.tensor([[1.0, 3.0, math.nan]]), torch.tensor([[1.0, 1.0, 0.0]])
    explained = functools.partial(losses.explained_variance, targets=targets, mask=mask)
    assert explained(torch.tensor([[1.0, 3.0, 7.0]])) == 1.0
    assert explained(torch.tensor([[6.0, 8.0, 7.0]])) == 1.0  # A constant error is not a variance.
    assert explained(torch.tensor([[2.0, 2.0, 7.0]])) == 0.0
    assert explained(torch.tensor([[3.0, 1.0, 7.0]])) == -3.0
    assert losses.explained_variance(torch.ones(1), torch.ones(1)) == 0.0
