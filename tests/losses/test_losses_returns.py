"""Returns and advantages against per-episode recursions written the slow way, and values worked by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import losses


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


KINDS = ["gae", "lambda", "n_step", "vtrace", "vtrace_advantage", "retrace"]
KINDS += ["watkins", "watkins, greedy given", "peng"]


@pytest.mark.parametrize("kind", KINDS)
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
