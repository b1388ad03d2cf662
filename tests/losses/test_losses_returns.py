"""Returns and advantages against per-episode recursions written the slow way, and values worked by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import losses

GAMMA = 0.9


def rows_of(episodes, length, start=0):
    """Rows of ``[(rewards, environment discounts, values)]``, a closing row after each, from ``start`` on.

    What is left over at either end is padding with values that must not matter.
    """
    reward, discount, value, mask = ([] for _ in range(4))
    for rewards, discounts, values in episodes:
        assert len(values) == len(rewards) + 1
        reward += [*rewards, 0.0]
        discount += [*discounts, 0.0]
        value += values
        mask += [1.0] * len(rewards) + [0.0]
    pad = length - start - len(reward)
    assert pad >= 0
    columns = []
    for column, filler in ((reward, 0.0), (discount, 0.0), (value, 77.0), (mask, 0.0)):
        columns.append(torch.tensor([[filler] * start + column + [filler] * pad], dtype=torch.float64))
    reward, discount, value, mask = columns
    return reward, GAMMA * discount, value, mask


# Two steps, then truncated: design section 4.
TRUNCATED = ([1.0, 1.0], [1.0, 1.0], [4.0, 4.0, 10.0])
FOLLOWED_BY = {
    "nothing": [],
    "a terminated episode": [([3.0, -2.0], [1.0, 0.0], [5.0, -6.0, 99.0])],
    "an episode cut by the end of the sequence": [([3.0] * 4, [1.0] * 4, [5.0] * 5)],
}


@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("follower", FOLLOWED_BY)
@pytest.mark.parametrize(
    "estimator", ["gae", "lambda", "vtrace", "vtrace advantage", "retrace", "peng", "watkins"]
)
def test_a_truncation_bootstraps_from_the_closing_row_anywhere_in_the_sequence(estimator, follower, start):
    rewards, discounts, values, mask = rows_of([TRUNCATED, *FOLLOWED_BY[follower]], 12, start)
    zeros = torch.zeros_like(rewards)
    advantages = {
        "gae": lambda: losses.generalized_advantages(rewards, discounts, values, mask, 0.95),
        "lambda": lambda: losses.lambda_returns(rewards, discounts, values, mask, 0.95) - values,
        "vtrace": lambda: losses.vtrace(zeros, rewards, discounts, values, mask, 0.95).targets - values,
        "vtrace advantage": lambda: losses.vtrace(zeros, rewards, discounts, values, mask, 0.95).advantages,
        "retrace": lambda: losses.retrace(zeros, rewards, discounts, values, values, mask, 0.95) - values,
        "peng": lambda: losses.peng_q_lambda(rewards, discounts, values, values, mask, 0.95) - values,
        "watkins": lambda: losses.watkins_q_lambda(rewards, discounts, values, values, mask, 0.95) - values,
    }[estimator]()
    assert advantages[0, start].item() == pytest.approx(5.73)
    assert advantages[0, start + 1].item() == pytest.approx(6.0)
    assert (advantages * (1 - mask)).abs().max() == 0


def test_n_step_returns_of_the_worked_case():
    rewards, discounts, values, mask = rows_of([TRUNCATED], 6, 2)
    for n, expected in [(1, [4.6, 10.0]), (2, [10.0, 10.0]), (9, [10.0, 10.0])]:
        returns = losses.n_step_returns(rewards, discounts, values, mask, n)
        assert returns[0, 2:4].tolist() == pytest.approx(expected), n


def test_a_termination_ignores_the_value_of_the_closing_row():
    rewards, discounts, values, mask = rows_of([([1.0, 1.0], [1.0, 0.0], [4.0, 4.0, 1e6])], 3)
    advantages = losses.generalized_advantages(rewards, discounts, values, mask, 0.95)
    assert advantages[0].tolist() == pytest.approx([1 + 3.6 - 4 + 0.855 * -3, -3.0, 0.0])


def test_wrong_shapes_are_named():
    good = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"values.*\(2, 3, 1\)"):
        losses.generalized_advantages(good, good, good[..., None], good, 0.9)
    with pytest.raises(ValueError, match="log_rhos"):
        losses.vtrace(good[:1], good, good, good, good)
    none = torch.ones(2, 0)
    with pytest.raises(ValueError, match=r"rewards': \(2, 0\).*T at least 1"):
        losses.generalized_advantages(none, none, none, none, 0.9)
    assert losses.transition_mask(none).shape == (2, 0)
    with pytest.raises(ValueError, match="n: got 0"):
        losses.n_step_returns(good, good, good, good, 0)


# --- Against recursions over one episode at a time -------------------------------------------------------


@st.composite
def sequences(draw):
    """One sequence cut at random out of a stream of episodes, with everything the estimators need."""
    seed = draw(st.integers(0, 2**32 - 1))
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    random = np.random.default_rng(seed)
    mask, discount = [], []
    for length in lengths:
        mask += [1.0] * length + [0.0]
        discount += [*random.uniform(0.3, 1.0, length), 0.0]
        if random.random() < 0.5:
            discount[-2] = 0.0  # Terminated.
    first = draw(st.integers(0, len(mask) - 2))
    last = draw(st.integers(first + 2, len(mask)))
    mask, discount = np.array(mask[first:last]), np.array(discount[first:last])
    size = len(mask)
    return {
        "mask": mask,
        "discounts": discount,
        "rewards": random.normal(size=size) * mask,
        "values": random.normal(size=size),
        "other": random.normal(size=size),
        "log_rhos": random.normal(size=size),
    }


def slow(kind, s, lambda_=0.8, n=3, clip_rho=1.2, clip_c=0.9):
    """The estimate for each row by recursion, straight from the papers; None where there is none."""
    r, d, v, q, mask = s["rewards"], s["discounts"], s["values"], s["other"], s["mask"]
    rho = np.exp(s["log_rhos"])
    size = len(mask)

    def is_transition(t):
        return t < size - 1 and mask[t] == 1

    def gae(t):  # A sum over the future, not the recursion that the library uses.
        total, weight = 0.0, 1.0
        while is_transition(t):
            total += weight * (r[t] + d[t] * v[t + 1] - v[t])
            weight *= d[t] * lambda_
            t += 1
        return total

    def n_step(t, left):
        if left == 0 or not is_transition(t):
            return v[t]
        return r[t] + d[t] * n_step(t + 1, left - 1)

    def lambda_return(t):
        if not is_transition(t):
            return v[t]
        return r[t] + d[t] * ((1 - lambda_) * v[t + 1] + lambda_ * lambda_return(t + 1))

    def vtrace(t):  # Equation 1: a sum of corrections, each weighed by the product of the c before it.
        total, weight = v[t], 1.0
        while is_transition(t):
            total += weight * min(clip_rho, rho[t]) * (r[t] + d[t] * v[t + 1] - v[t])
            weight *= d[t] * lambda_ * min(clip_c, rho[t])
            t += 1
        return total

    def vtrace_advantage(t):
        ahead = lambda_ * vtrace(t + 1) + (1 - lambda_) * v[t + 1]
        return min(clip_rho, rho[t]) * (r[t] + d[t] * ahead - v[t])

    def off_policy(t, cut):
        if not is_transition(t):
            return None
        behind = off_policy(t + 1, cut)
        extra = 0.0 if behind is None else cut(t + 1) * (behind - q[t + 1])
        return r[t] + d[t] * (v[t + 1] + extra)

    def peng(t):
        if not is_transition(t):
            return v[t]
        return r[t] + d[t] * ((1 - lambda_) * v[t + 1] + lambda_ * peng(t + 1))

    function = {
        "gae": gae,
        "lambda": lambda_return,
        "n_step": lambda t: n_step(t, n),
        "vtrace": vtrace,
        "vtrace_advantage": vtrace_advantage,
        "retrace": lambda t: off_policy(t, lambda u: lambda_ * min(1.0, rho[u])),
        "watkins": lambda t: off_policy(t, lambda u: lambda_ * (q[u] >= v[u])),
        "watkins, greedy given": lambda t: off_policy(t, lambda u: lambda_ * (rho[u] > 1)),
        "peng": peng,
    }[kind]
    return [function(t) if is_transition(t) else None for t in range(size)]


@pytest.mark.parametrize(
    "kind",
    [
        *("gae", "lambda", "n_step", "vtrace", "vtrace_advantage", "retrace"),
        *("watkins", "watkins, greedy given", "peng"),
    ],
)
@settings(max_examples=60, deadline=None)
@given(s=sequences())
def test_against_a_recursion_over_each_episode(kind, s):
    t = {name: torch.tensor(column)[None] for name, column in s.items()}
    args = (t["rewards"], t["discounts"])
    trace = {"lambda_": 0.8, "clip_rho": 1.2, "clip_c": 0.9}
    fast = {
        "gae": lambda: losses.generalized_advantages(*args, t["values"], t["mask"], 0.8),
        "lambda": lambda: losses.lambda_returns(*args, t["values"], t["mask"], 0.8),
        "n_step": lambda: losses.n_step_returns(*args, t["values"], t["mask"], 3),
        "vtrace": lambda: losses.vtrace(t["log_rhos"], *args, t["values"], t["mask"], **trace).targets,
        "vtrace_advantage": lambda: (
            losses.vtrace(t["log_rhos"], *args, t["values"], t["mask"], **trace).advantages
        ),
        "retrace": lambda: losses.retrace(t["log_rhos"], *args, t["other"], t["values"], t["mask"], 0.8),
        "watkins": lambda: losses.watkins_q_lambda(*args, t["other"], t["values"], t["mask"], 0.8),
        "watkins, greedy given": lambda: losses.watkins_q_lambda(
            *args, t["other"], t["values"], t["mask"], 0.8, t["log_rhos"] > 0
        ),
        "peng": lambda: losses.peng_q_lambda(*args, t["other"], t["values"], t["mask"], 0.8),
    }[kind]()[0].numpy()
    expected = slow(kind, s)
    usable = losses.transition_mask(t["mask"])[0].numpy()
    for row, value in enumerate(expected):
        assert (value is not None) == bool(usable[row])
        if value is not None:
            np.testing.assert_allclose(fast[row], value, rtol=1e-9, atol=1e-9)


def test_on_policy_retrace_with_lambda_1_is_the_monte_carlo_return():
    random = np.random.default_rng(3)
    rewards, values = list(random.normal(size=6)), list(random.normal(size=7))
    r, d, v, mask = rows_of([(rewards, [1.0] * 5 + [0.0], values)], 7)
    result = losses.retrace(torch.zeros_like(r), r, d, v, v, mask, 1.0)[0]
    expected = [sum(GAMMA ** (k - t) * rewards[k] for k in range(t, 6)) for t in range(6)]
    assert result[:6].tolist() == pytest.approx(expected)


def test_targets_carry_no_gradient():
    ones = torch.ones(2, 4)
    values = torch.randn(2, 4, requires_grad=True)
    for result in [
        losses.generalized_advantages(ones, ones, values, ones, 0.9),
        losses.lambda_returns(ones, ones, values, ones, 0.9),
        losses.n_step_returns(ones, ones, values, ones, 2),
        losses.vtrace(values, ones, ones, values, ones).targets,
        losses.retrace(values, ones, ones, values, values, ones),
    ]:
        assert not result.requires_grad
