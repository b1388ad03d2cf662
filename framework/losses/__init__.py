"""Losses and their targets: pure functions of tensors, each named after its publication.

Sequences are batch-major `[N, T]` rows with a mask; `framework.losses.returns` shows how the end of an
episode is treated, wherever in a sequence it lies.
"""

from framework.losses.entropy import (
    categorical_entropy,
    categorical_kl,
    gaussian_entropy,
    gaussian_kl,
    mask_logits,
    multi_discrete_entropy,
    squashed_gaussian_entropy,
)
from framework.losses.meta import episode_times, inner_step, likelihood_ratio_loss, linear_baseline
from framework.losses.policy import (
    Surrogate,
    adapt_kl_coefficient,
    clipped_surrogate,
    clipped_value_loss,
    kl_penalty_surrogate,
    masked_mean,
    normalize_advantages,
    policy_gradient_loss,
    value_loss,
)
from framework.losses.q_learning import double_q_errors, huber, importance_weights, q_learning_errors
from framework.losses.returns import (
    VTrace,
    generalized_advantages,
    lambda_returns,
    n_step_returns,
    peng_q_lambda,
    retrace,
    transition_mask,
    vtrace,
    watkins_q_lambda,
)
from framework.losses.sac import (
    discrete_soft_value,
    sac_actor_loss,
    sac_critic_loss,
    sac_discrete_actor_loss,
    sac_temperature_loss,
    soft_value,
)

__all__ = [
    "Surrogate",
    "VTrace",
    "adapt_kl_coefficient",
    "categorical_entropy",
    "categorical_kl",
    "clipped_surrogate",
    "clipped_value_loss",
    "discrete_soft_value",
    "double_q_errors",
    "episode_times",
    "gaussian_entropy",
    "gaussian_kl",
    "generalized_advantages",
    "huber",
    "importance_weights",
    "inner_step",
    "kl_penalty_surrogate",
    "lambda_returns",
    "likelihood_ratio_loss",
    "linear_baseline",
    "mask_logits",
    "masked_mean",
    "multi_discrete_entropy",
    "n_step_returns",
    "normalize_advantages",
    "peng_q_lambda",
    "policy_gradient_loss",
    "q_learning_errors",
    "retrace",
    "sac_actor_loss",
    "sac_critic_loss",
    "sac_discrete_actor_loss",
    "sac_temperature_loss",
    "soft_value",
    "squashed_gaussian_entropy",
    "transition_mask",
    "value_loss",
    "vtrace",
    "watkins_q_lambda",
]
