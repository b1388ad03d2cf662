"""Returns and advantages over sequences of rows.

Every function takes batch-major `[N, T]` rows as a sequence adder writes them, closing rows among them:

```text
row              0      1      2        3      4
observation      o_0    o_1    o_2      o'_0   o'_1      an episode of two steps, then the next one
reward           r_1    r_2    0        r'_1   …
discounts        d_1    d_2    0        d'_1   …         gamma times the environment's discount
mask             1      1      0        1      1
values           V_0    V_1    V_2      V'_0   V'_1
```

Row t is a transition if its mask is 1 and the sequence has a row t + 1. After a truncation, row t + 1 is the
closing row (mask 0), and the last step bootstraps from its value. After a termination, the discount is 0, and
the value of the closing row does not count. Neither do the numbers in padding. Both may be NaN or infinite.
Traces end at a closing row. The last row of a sequence serves as the bootstrap only. An episode may therefore
end anywhere in a sequence. Results are `[N, T]`. Where there is no transition (see `transition_mask`),
advantages are 0 and targets are the given values.

The results have no gradient: targets are constants for the losses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from framework.config_checks import whole_number
from framework.losses.masking import discounted, where_counted


def transition_mask(mask: torch.Tensor) -> torch.Tensor:
    """`[N, T]` float: 1 where the row is a transition that can be learned from.

    That is `mask` without its last column, whose next observation lies beyond the sequence.
    """
    usable = mask.float().clone()
    usable[:, -1:] = 0.0
    return usable


def clipped_rewards(rewards: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Rewards as float32, clipped to +- `limit` (Mnih et al., 2015); None keeps them."""
    rewards = rewards.float()
    return rewards if limit is None else rewards.clamp(-limit, limit)


def generalized_advantages(
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    lambda_: float,
) -> torch.Tensor:
    """Generalized advantage estimation (Schulman et al., 2016, equation 16), `[N, T]`.

    A_t = delta_t + d_t lambda A_{t+1}, with delta_t = r_t + d_t V_{t+1} - V_t.

    Args:
      rewards: `[N, T]` reward that resulted from each row's action.
      discounts: `[N, T]` gamma times the environment's discount.
      values: `[N, T]` value of each row's observation, closing rows included.
      mask: `[N, T]` 1 on real transitions, 0 on closing rows and padding.
      lambda_: 0 gives one-step errors, 1 Monte-Carlo returns minus values.
    """
    with torch.no_grad():
        _check(rewards=rewards, discounts=discounts, values=values, mask=mask)
        usable = transition_mask(mask)
        errors = where_counted(rewards + discounted(discounts, _next(values)) - values, usable)
        return _reverse_scan(errors, lambda_ * _trace(discounts, usable))


def lambda_returns(
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    lambda_: float,
) -> torch.Tensor:
    """Lambda-returns (Sutton, 1988), `[N, T]`: G_t = r_t + d_t ((1 - lambda) V_{t+1} + lambda G_{t+1}).

    Arguments as in `generalized_advantages`. The result is the sum of those advantages and the values.
    """
    return values.detach() + generalized_advantages(rewards, discounts, values, mask, lambda_)


def n_step_returns(
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    n: int,
) -> torch.Tensor:
    """n-step returns (Watkins, 1989), `[N, T]`: n rewards, then the value of the n-th next row.

    There are fewer rewards where the episode or the sequence ends sooner. Arguments as in
    `generalized_advantages`.
    """
    whole_number("n", n, 1)
    with torch.no_grad():
        _check(rewards=rewards, discounts=discounts, values=values, mask=mask)
        usable = transition_mask(mask)
        returns = values.clone()
        for _ in range(n):
            # Rows that are not transitions keep their value: the row before bootstraps from it.
            returns = torch.where(usable > 0, rewards + discounted(discounts, _next(returns)), values)
        return returns


class VTrace(NamedTuple):
    """The result of `vtrace`; each field is `[N, T]`.

    Attributes:
      targets: targets of the values; the value itself where there is no transition.
      advantages: for the policy gradient, the clipped importance weight included.
      clipped: 1 where the importance weight was larger than `clip_rho`, for the logs.
    """

    targets: torch.Tensor
    advantages: torch.Tensor
    clipped: torch.Tensor


def vtrace(
    log_rhos: torch.Tensor,
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    lambda_: float = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
) -> VTrace:
    """V-trace (Espeholt et al., 2018, equation 1, with the lambda of its remark 2).

    v_t = V_t + rho_t delta_t + d_t c_t (v_{t+1} - V_{t+1}), with rho = min(clip_rho, pi/mu) and
    c = lambda min(clip_c, pi/mu). The advantage is rho_t (r_t + d_t u_{t+1} - V_t), where
    u_{t+1} = lambda v_{t+1} + (1 - lambda) V_{t+1}, so that on-policy it is GAE's for every lambda,
    and the paper's for lambda = 1.

    Args:
      log_rhos: `[N, T]` log pi(a|o) - log mu(a|o), of the learner's policy and the one that acted.
      lambda_: 1 is the paper's; less cuts variance and adds bias.
      clip_rho: rho-bar, which determines the fixed point; infinity gives the value of pi itself.
      clip_c: c-bar, which determines the speed of convergence only.

    Other arguments as in `generalized_advantages`.
    """
    with torch.no_grad():
        _check(log_rhos=log_rhos, rewards=rewards, discounts=discounts, values=values, mask=mask)
        usable = transition_mask(mask)
        # No action was taken in a closing row. Its ratio may be infinite or NaN and must not spread.
        ratios = where_counted(log_rhos, usable).exp()
        rhos = ratios.clamp(max=clip_rho)
        trace = lambda_ * _trace(discounts, usable)
        errors = where_counted(rhos * (rewards + discounted(discounts, _next(values)) - values), usable)
        corrections = _reverse_scan(errors, trace * ratios.clamp(max=clip_c))
        ahead = _next(values) + lambda_ * _next(corrections)  # corrections are 0 where there is no transition
        advantages = where_counted(rhos * (rewards + discounted(discounts, ahead) - values), usable)
        clipped = usable * (ratios > clip_rho).float()
        return VTrace(values + corrections, advantages, clipped)


def retrace(
    log_rhos: torch.Tensor,
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    action_values: torch.Tensor,
    expected_values: torch.Tensor,
    mask: torch.Tensor,
    lambda_: float = 1.0,
) -> torch.Tensor:
    """Retrace(lambda) targets of action values (Munos et al., 2016), `[N, T]`.

    G_t = r_t + d_t (E_pi Q(o_{t+1}, .) + c_{t+1} (G_{t+1} - Q(o_{t+1}, a_{t+1}))), c = lambda min(1, pi/mu).

    Args:
      log_rhos: `[N, T]` log pi(a|o) - log mu(a|o) of each row's action.
      action_values: `[N, T]` value of each row's action, of the target network.
      expected_values: `[N, T]` mean over pi of the values of each row, closing rows included.

    Other arguments as in `generalized_advantages`. Rows that are not transitions get `action_values`.
    """
    with torch.no_grad():
        _check(log_rhos=log_rhos, rewards=rewards, discounts=discounts, mask=mask)
        _check(rewards=rewards, action_values=action_values, expected_values=expected_values)
        usable = transition_mask(mask)
        cuts = lambda_ * where_counted(log_rhos, usable).exp().clamp(max=1.0)
        ahead = discounted(discounts, _next(expected_values))
        errors = where_counted(rewards + ahead - action_values, usable)
        # The sum of all later errors; the cut of row t + 1 weighs what lies behind it.
        return action_values + _reverse_scan(errors, _trace(discounts, usable) * _next(cuts))


def watkins_q_lambda(
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    action_values: torch.Tensor,
    best_values: torch.Tensor,
    mask: torch.Tensor,
    lambda_: float,
    greedy: torch.Tensor | None = None,
) -> torch.Tensor:
    """Watkins' Q(lambda) (1989): traces are cut at the first action that is not greedy, `[N, T]`.

    This is `retrace` with the greedy policy as pi, whatever policy acted.

    Args:
      action_values: `[N, T]` value of each row's action, of the target network.
      best_values: `[N, T]` largest value of each row, closing rows included.
      greedy: bool`[N, T]`, whether each row's action is the greedy one. None: where its value is not below
        the largest. With double Q-learning another network decides that.

    Other arguments as in `generalized_advantages`.
    """
    _check(action_values=action_values, best_values=best_values)
    if greedy is None:
        greedy = action_values >= best_values
    _check(greedy=greedy, rewards=rewards)
    # A greedy action has the probability 1 under pi, and at most 1 under the policy that acted.
    log_rhos = torch.where(greedy, 0.0, -torch.inf).to(action_values.dtype)
    return retrace(log_rhos, rewards, discounts, action_values, best_values, mask, lambda_)


def peng_q_lambda(
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    action_values: torch.Tensor,
    best_values: torch.Tensor,
    mask: torch.Tensor,
    lambda_: float,
) -> torch.Tensor:
    """Peng and Williams' Q(lambda) (1994), `[N, T]`: lambda-returns over the largest values.

    Faster than Watkins', but biased where actions explore. Arguments as in `watkins_q_lambda`.
    """
    with torch.no_grad():
        _check(rewards=rewards, action_values=action_values)
        returns = lambda_returns(rewards, discounts, best_values, mask, lambda_)
        return torch.where(transition_mask(mask) > 0, returns, action_values)


def _check(**tensors: torch.Tensor) -> None:
    """Raises ValueError unless all are `[N, T]` of equal shape: an extra axis would silently broadcast."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shape = next(iter(shapes.values()))
    if len(set(shapes.values())) > 1 or len(shape) != 2 or not shape[1]:
        raise ValueError(f"shapes: got {shapes}, expected [N, T] with T at least 1, the same for all.")


def _next(rows: torch.Tensor) -> torch.Tensor:
    """The successor of each row; 0 after the last."""
    return torch.nn.functional.pad(rows[:, 1:], (0, 1))


def _trace(discounts: torch.Tensor, usable: torch.Tensor) -> torch.Tensor:
    """Discounts where a row and its successor are transitions, so that a trace continues; else 0."""
    return where_counted(discounts, usable * _next(usable))


def _reverse_scan(inputs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """y_t = x_t + f_t y_{t+1} along the second axis, with y = 0 after the end."""
    result = torch.zeros_like(inputs[:, 0])
    results = []
    # One fused operation per time step. Everything else is computed for the whole sequence at once.
    for x, f in zip(reversed(inputs.unbind(1)), reversed(factors.unbind(1)), strict=True):
        result = torch.addcmul(x, f, result)
        results.append(result)
    return torch.stack(results[::-1], 1)
