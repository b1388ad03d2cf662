"""Model-agnostic meta-learning (Finn et al., 2017): inner steps that gradients pass through, and a baseline.

The parameters of a module are a dict, as `dict(module.named_parameters())`; `torch.func.functional_call`
evaluates the module with other parameters. All functions work under `torch.func.vmap` over tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from framework.losses.masking import check_alike, where_counted
from framework.losses.policy import masked_mean
from framework.losses.returns import generalized_advantages, transition_mask

Parameters = Mapping[str, torch.Tensor]


def inner_step(
    parameters: Parameters, loss: Callable[[Parameters], torch.Tensor], learning_rate: float
) -> dict[str, torch.Tensor]:
    """theta' = theta - alpha grad loss(theta) (Finn et al., 2017, equation 1), differentiable in theta.

    A gradient through the result contains second derivatives of `loss`. First-order MAML stops them:
    detach the difference of the result and `parameters`.

    Args:
      parameters: theta.
      loss: a function of parameters to a scalar.
      learning_rate: alpha.
    """
    gradients = torch.func.grad(loss)(dict(parameters))
    return {name: value - learning_rate * gradients[name] for name, value in parameters.items()}


def likelihood_ratio_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """-pi(a|o) / pi_old(a|o) A, the inner loss of ProMP (Rothfuss et al., 2019, equation 6).

    At the parameters that acted, its gradient is `policy_gradient_loss`'s. Its second derivatives
    estimate the expected return's. Derivatives of -log pi A do not: the samples depend on the policy, too.
    """
    check_alike(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    ratios = where_counted(log_probs - old_log_probs.detach(), mask).exp()
    return masked_mean(-ratios * where_counted(advantages.detach(), mask), mask)


def episode_times(start_of_episode: torch.Tensor) -> torch.Tensor:
    """Steps since the start of the episode, float `[N, T]`, from the flags of rows; row 0 has 0."""
    rows = torch.arange(start_of_episode.shape[1], device=start_of_episode.device)
    starts = torch.where(start_of_episode > 0, rows, 0)
    return (rows - starts.cummax(1).values).float()


def linear_baseline(
    observations: torch.Tensor,
    times: torch.Tensor,
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    mask: torch.Tensor,
    ridge: float = 1e-5,
) -> torch.Tensor:
    """Values `[N, T]` that are linear in features of the rows, fitted to the batch (Duan et al., 2016).

    The features are o, o², t, t², t³ and 1, with o clipped to ±10 and t in hundreds of steps. The fit
    minimizes the squared advantages A_t = sum of d^k r + d^n V(o_{t+n}) - V(o_t), both values with the new
    weights. It therefore also fits episodes that are truncated, which bootstrap. Duan et al. fit the sums of
    rewards, as if the last value were 0.

    Args:
      observations: `[N, T, D]`.
      times: `[N, T]` steps since the start of the episode; see `episode_times`.
      ridge: weight of the squared weights, per row.

    Other arguments as in `generalized_advantages`.
    """
    with torch.no_grad():
        clipped, t = observations.double().clamp(-10.0, 10.0), times.double().unsqueeze(-1) / 100.0
        features = torch.cat([clipped, clipped**2, t, t**2, t**3, torch.ones_like(t)], -1)
        rewards, discounts = rewards.double(), discounts.double()
        # Advantages are linear in rewards and values. Those of each feature alone, without rewards:
        zeros = torch.zeros_like(rewards)
        columns = [generalized_advantages(zeros, discounts, f, mask, 1.0) for f in features.unbind(-1)]
        targets = generalized_advantages(rewards, discounts, zeros, mask, 1.0)
        matrix = -torch.stack(columns, -1).flatten(0, 1)  # 0 where there is no transition
        count = transition_mask(mask).sum().clamp(min=1.0)
        gram = matrix.T @ matrix / count + ridge * torch.eye(matrix.shape[-1]).to(matrix)
        weights = torch.linalg.solve(gram, matrix.T @ targets.flatten() / count)
        return (features @ weights).to(observations.dtype)
