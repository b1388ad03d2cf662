"""What does not count may hold anything, NaN and inf too: results and gradients are as if it were 0."""

import inspect
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import losses

GARBAGE = (math.nan, math.inf, -math.inf)
NUM_ENVS, LENGTH = 3, 9


def finite_loss_of(surrogate):
    def loss(**named):
        result = surrogate(**named)
        assert all(part.isfinite().all() for part in result)
        return result.loss

    return loss


OF_OLD = {"old_log_probs": (), "advantages": ()}
kl_penalty = partial(losses.kl_penalty_surrogate, coefficient=0.7, target_kl=0.01)
# Name: the arguments that carry a gradient, those that do not (their shape behind [N, T]; None is a 0-d
# parameter), and the loss. Arguments are passed by name.
LOSSES = {
    "masked_mean": ({"values": ()}, {}, losses.masked_mean),
    "normalize_advantages": (
        {"scores": ()},
        {"advantages": ()},
        lambda scores, advantages, mask: (scores * losses.normalize_advantages(advantages, mask))[
            mask > 0
        ].sum(),
    ),
    "policy_gradient_loss": ({"log_probs": ()}, {"advantages": ()}, losses.policy_gradient_loss),
    "clipped_surrogate": ({"log_probs": ()}, OF_OLD, finite_loss_of(losses.clipped_surrogate)),
    "impact_surrogate": (
        {"log_probs": ()},
        {"target_log_probs": (), "acting_log_probs": (), "advantages": ()},
        finite_loss_of(losses.impact_surrogate),
    ),
    "kl_penalty_surrogate": ({"log_probs": (), "kl": ()}, OF_OLD, finite_loss_of(kl_penalty)),
    "kl_penalty_surrogate, several learners": (
        {"log_probs": (), "kl": ()},
        OF_OLD,
        finite_loss_of(partial(kl_penalty, total=lambda part: 2 * part)),
    ),
    "likelihood_ratio_loss": ({"log_probs": ()}, OF_OLD, losses.likelihood_ratio_loss),
    "value_loss": ({"values": ()}, {"targets": ()}, losses.value_loss),
    "explained_variance": ({"values": ()}, {"targets": ()}, losses.explained_variance),
    "clipped_value_loss": ({"values": ()}, {"old_values": (), "targets": ()}, losses.clipped_value_loss),
    "deterministic_policy_loss": ({"action_values": ()}, {}, losses.deterministic_policy_loss),
    "mpo_temperature_loss": (
        {"temperature": None},
        {"action_values": (4,)},
        lambda temperature, **named: losses.mpo_temperature_loss(
            **named, temperature=temperature.exp(), epsilon=0.1
        ),
    ),
    "mpo_likelihood_loss": ({"log_probs": (4,)}, {"weights": (4,)}, losses.mpo_likelihood_loss),
    "kl_constraint": (
        {"kl": (2,), "multiplier": None},
        {},
        lambda kl, multiplier, mask: sum(losses.kl_constraint(kl, multiplier.expand(2), 0.3, mask)),
    ),
    "sac_critic_loss": (
        {"action_values": (2,)},
        {"rewards": (), "discounts": (), "next_soft_values": ()},
        lambda action_values, **named: losses.sac_critic_loss(action_values.movedim(-1, 0), **named),
    ),
    "sac_actor_loss": (
        {"log_probs": (), "action_values": ()},
        {},
        partial(losses.sac_actor_loss, temperature=0.3),
    ),
    "sac_discrete_actor_loss": (
        {"logits": (4,)},
        {"action_values": (4,)},
        partial(losses.sac_discrete_actor_loss, temperature=0.3),
    ),
    "sac_temperature_loss": (
        {"log_temperature": None},
        {"log_probs": ()},
        partial(losses.sac_temperature_loss, target_entropy=-1.0),
    ),
}

# Name: the arguments beside rewards, discounts and mask, and the function; results are those of transitions.
RETURNS = {
    "generalized_advantages": (["values"], partial(losses.generalized_advantages, lambda_=0.9)),
    "lambda_returns": (["values"], partial(losses.lambda_returns, lambda_=0.9)),
    "n_step_returns": (["values"], partial(losses.n_step_returns, n=3)),
    "vtrace": (["log_rhos", "values"], partial(losses.vtrace, lambda_=0.9, clip_rho=1.5)),
    "vtrace, unclipped": (["log_rhos", "values"], partial(losses.vtrace, clip_rho=math.inf, clip_c=math.inf)),
    "retrace": (["log_rhos", "action_values", "expected_values"], partial(losses.retrace, lambda_=0.9)),
    "watkins_q_lambda": (["action_values", "best_values"], partial(losses.watkins_q_lambda, lambda_=0.9)),
    "peng_q_lambda": (["action_values", "best_values"], partial(losses.peng_q_lambda, lambda_=0.9)),
}

seeds = st.integers(0, 2**32 - 1)


def drawn(random, extra):
    shape = () if extra is None else (NUM_ENVS, LENGTH, *extra)
    return torch.tensor(random.normal(size=shape))


def filled(values, where, filler):
    """``values`` ``[N, T, ...]`` with ``filler`` in the rows that ``where`` ``[N, T]`` says."""
    if not values.ndim:
        return values
    values = values.clone()
    values[where] = filler
    return values


def episodes(random):
    """Mask and discounts ``[N, T]`` of episodes that terminate or are truncated, with padding around them."""
    mask, discounts = np.zeros((2, NUM_ENVS, LENGTH))
    for env in range(NUM_ENVS):
        begin = random.integers(0, 3)
        while begin < LENGTH:
            end = begin + random.integers(1, 5)
            mask[env, begin:end] = 1.0
            discounts[env, begin:end] = 0.9
            if end <= LENGTH and random.random() < 0.6:
                discounts[env, end - 1] = 0.0
            begin = end + random.choice([1, 3])
    return torch.tensor(mask), torch.tensor(discounts)


def test_every_function_that_takes_a_mask_is_here():
    takes_a_mask = {
        name
        for name, function in vars(losses).items()
        if inspect.isfunction(function) and "mask" in inspect.signature(function).parameters
    }
    elsewhere = {"transition_mask", "linear_baseline", "sequence_priorities"}
    assert {name.split(",")[0] for name in {**LOSSES, **RETURNS}} == takes_a_mask - elsewhere


@pytest.mark.parametrize("garbage", GARBAGE)
def test_the_linear_baseline_does_not_see_padding(garbage):
    random = torch.Generator().manual_seed(0)
    observations = torch.randn(2, 8, 3, generator=random)
    rewards = torch.randn(2, 8, generator=random)
    discounts = torch.full((2, 8), 0.9)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0, 0]]).float()
    times = torch.arange(8).float().expand(2, 8)

    def fit(fill):
        seen, paid, kept = observations.clone(), rewards.clone(), discounts.clone()
        seen[1, 4:] = fill  # row 3 closes the episode, which bootstraps from it
        paid[mask == 0] = fill
        kept[mask == 0] = fill
        return losses.linear_baseline(seen, times, paid, kept, mask)[mask > 0]

    torch.testing.assert_close(fit(garbage), fit(0.0))


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=30, deadline=None)
@given(seed=seeds, garbage=st.sampled_from(GARBAGE), share=st.sampled_from([0.0, 0.3, 0.9]))
def test_losses_do_not_see_what_is_masked(name, seed, garbage, share):
    trained, constant, loss_fn = LOSSES[name]
    random = np.random.default_rng(seed)
    mask = torch.tensor(random.random((NUM_ENVS, LENGTH)) < share).double()
    arguments = {key: drawn(random, extra) for key, extra in {**trained, **constant}.items()}

    def loss_and_gradients(filler):
        given = {key: filled(value, mask == 0, filler) for key, value in arguments.items()}
        leaves = [given[key].requires_grad_() for key in trained]
        loss = loss_fn(**given, mask=mask)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    for clean, result in zip(loss_and_gradients(0.0), loss_and_gradients(garbage), strict=True):
        assert result.isfinite().all()
        assert torch.equal(result, clean)


@pytest.mark.parametrize("name", RETURNS)
@settings(max_examples=60, deadline=None)
@given(seed=seeds, garbage=st.sampled_from(GARBAGE))
def test_returns_do_not_see_padding_nor_what_lies_behind_a_termination(name, seed, garbage):
    others, function = RETURNS[name]
    random = np.random.default_rng(seed)
    mask, discounts = episodes(random)
    values = {key: drawn(random, ()) for key in others}
    rewards = drawn(random, ())
    counts = losses.transition_mask(mask) > 0
    # The row behind a truncation has a value and nothing else, the one behind a termination nothing at all.
    before = torch.nn.functional.pad((mask * discounts)[:, :-1], (1, 0))
    bootstraps = before > 0

    def results(filler):
        given = {
            "rewards": filled(rewards, ~counts, filler),
            "discounts": filled(discounts, ~counts, filler),
            **{
                key: filled(value, ~counts if key == "log_rhos" else ~(counts | bootstraps), filler)
                for key, value in values.items()
            },
        }
        found = function(**given, mask=mask)
        return (torch.stack(found, -1) if isinstance(found, tuple) else found)[counts]

    assert torch.equal(results(garbage), results(0.0))
    assert results(garbage).isfinite().all()


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_transition_that_terminates_does_not_see_the_next_value(garbage):
    rewards, discounts = torch.tensor([1.0, 2.0]), torch.tensor([0.9, 0.0])
    values, actions = torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([0, 1])
    next_values = torch.tensor([[10.0, 20.0], [garbage, garbage]])
    expected = pytest.approx([1.0 + 18.0 - 3.0, 2.0 - 6.0])
    assert losses.q_learning_errors(values, actions, rewards, discounts, next_values).tolist() == expected
    errors = losses.double_q_errors(values, actions, rewards, discounts, next_values, next_values)
    assert errors.tolist() == expected
    taken = torch.tensor([[3.0, 6.0]], requires_grad=True)
    loss = losses.sac_critic_loss(taken, rewards, discounts, next_values.amax(-1))
    loss.backward()
    assert loss.item() == pytest.approx((16.0**2 + 4.0**2) / 4)
    assert taken.grad.tolist() == [pytest.approx([-8.0, 2.0])]


def test_a_real_step_with_a_nan_is_not_hidden():
    ones = torch.ones(1, 3)
    bad = torch.tensor([[1.0, math.nan, 1.0]])
    assert losses.generalized_advantages(bad, 0.9 * ones, ones, ones, 0.9).isnan().any()
    assert losses.value_loss(bad, ones, ones).isnan()


@pytest.mark.parametrize(
    "call",
    [
        lambda good, bad: losses.policy_gradient_loss(good, bad),
        lambda good, bad: losses.clipped_surrogate(good, good, bad),
        lambda good, bad: losses.clipped_surrogate(good, bad, good),
        lambda good, bad: losses.impact_surrogate(good, good, bad, good),
        lambda good, bad: losses.kl_penalty_surrogate(good, good, good, bad, 1.0, 0.01),
        lambda good, bad: losses.value_loss(good, bad),
        lambda good, bad: losses.value_loss(good, good, bad),
        lambda good, bad: losses.clipped_value_loss(good, bad, good),
        lambda good, bad: losses.sac_actor_loss(good, bad, 0.3),
        lambda good, bad: losses.sac_critic_loss(good[None], good, bad, good),
        lambda good, bad: losses.sac_critic_loss(good[None], good, good, bad),
        lambda good, bad: losses.normalize_advantages(good, bad),
        lambda good, bad: losses.soft_value(good, bad, 0.3),
        lambda good, bad: losses.discrete_soft_value(good, bad, 0.3),
        lambda good, bad: losses.importance_weights(good, bad, 0.3),
    ],
)
def test_shapes_that_would_broadcast_into_nonsense_are_errors(call):
    with pytest.raises(ValueError, match=r"\(4, 1\)|\(2, 4, 1\)"):
        call(torch.ones(2, 4), torch.ones(2, 4, 1))


@pytest.mark.parametrize("which", ["rewards", "discounts"])
def test_q_learning_refuses_shapes_that_would_broadcast(which):
    named = {"rewards": torch.ones(4), "discounts": torch.ones(4), which: torch.ones(4, 1)}
    values, actions = torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"'{which}': \(4, 1\)"):
        losses.q_learning_errors(values, actions, **named, next_values=values)
    with pytest.raises(ValueError, match=rf"'{which}': \(4, 1\)"):
        losses.double_q_errors(values, actions, **named, next_values=values, next_selector=values)


@pytest.mark.parametrize(
    "shapes",
    [
        {"values": (6, 3)},
        {"values": (6, 3), "next_values": (6, 3), "next_selector": (6, 3)},
        {"next_values": (4, 4)},
        {"next_values": (4, 4), "next_selector": (4, 4)},
        {"next_values": (6, 3), "next_selector": (6, 3)},
        {"next_selector": (4, 2)},
        {"next_selector": (3, 3)},
        {"values": (4, 2, 3), "next_values": (4, 2, 3), "next_selector": (4, 2, 3)},
    ],
)
def test_q_learning_refuses_values_of_other_rows_or_of_other_actions(shapes):
    named = {key: torch.ones(shapes.get(key, (4, 3))) for key in ("values", "next_values", "next_selector")}
    ones = torch.ones(4)
    rows = {"actions": torch.zeros(4, dtype=torch.int64), "rewards": ones, "discounts": ones}
    with pytest.raises(ValueError, match=r"shapes: got|values: got shape"):
        losses.double_q_errors(**named, **rows)
    del named["next_selector"]
    if set(shapes) != {"next_selector"}:
        with pytest.raises(ValueError, match=r"shapes: got|values: got shape"):
            losses.q_learning_errors(**named, **rows)
