"""Losses and their targets: pure functions of tensors, each named after its publication.

Sequences are batch-major `[N, T]` rows with a mask; `framework.losses.returns` shows how the end of an
episode is treated, wherever in a sequence it lies.
"""

from framework.losses.demonstrations import large_margin_loss as large_margin_loss
from framework.losses.deterministic import clipped_double_q_errors as clipped_double_q_errors
from framework.losses.deterministic import deterministic_policy_loss as deterministic_policy_loss
from framework.losses.deterministic import smoothed_actions as smoothed_actions
from framework.losses.distributional import categorical_cross_entropy as categorical_cross_entropy
from framework.losses.distributional import categorical_projection as categorical_projection
from framework.losses.distributional import expected_returns as expected_returns
from framework.losses.distributional import of_actions as of_actions
from framework.losses.distributional import quantile_huber as quantile_huber
from framework.losses.distributional import (
    soft_categorical_critic_loss as soft_categorical_critic_loss,
)
from framework.losses.distributional import tqc_critic_loss as tqc_critic_loss
from framework.losses.distributional import truncated_quantiles as truncated_quantiles
from framework.losses.dreamer import balanced_kl as balanced_kl
from framework.losses.dreamer import percentile_range as percentile_range
from framework.losses.dreamer import race_noise as race_noise
from framework.losses.dreamer import straight_through_sample as straight_through_sample
from framework.losses.dreamer import symexp as symexp
from framework.losses.dreamer import symexp_bins as symexp_bins
from framework.losses.dreamer import symlog as symlog
from framework.losses.dreamer import two_hot_loss as two_hot_loss
from framework.losses.dreamer import two_hot_mean as two_hot_mean
from framework.losses.dreamer import unimix as unimix
from framework.losses.dynamics import ensemble_errors as ensemble_errors
from framework.losses.dynamics import rolling_validation as rolling_validation
from framework.losses.embeddings import embedding_loss as embedding_loss
from framework.losses.entropy import categorical_entropy as categorical_entropy
from framework.losses.entropy import categorical_kl as categorical_kl
from framework.losses.entropy import gaussian_entropy as gaussian_entropy
from framework.losses.entropy import gaussian_kl as gaussian_kl
from framework.losses.entropy import mask_logits as mask_logits
from framework.losses.entropy import multi_discrete_entropy as multi_discrete_entropy
from framework.losses.entropy import squashed_gaussian_entropy as squashed_gaussian_entropy
from framework.losses.lagrangian import PIDLagrangian as PIDLagrangian
from framework.losses.lagrangian import pid_lagrangian as pid_lagrangian
from framework.losses.masking import discounted as discounted
from framework.losses.meta import episode_times as episode_times
from framework.losses.meta import inner_step as inner_step
from framework.losses.meta import likelihood_ratio_loss as likelihood_ratio_loss
from framework.losses.meta import linear_baseline as linear_baseline
from framework.losses.mpo import KLConstraint as KLConstraint
from framework.losses.mpo import decoupled_gaussian_kl as decoupled_gaussian_kl
from framework.losses.mpo import kl_constraint as kl_constraint
from framework.losses.mpo import mpo_likelihood_loss as mpo_likelihood_loss
from framework.losses.mpo import mpo_temperature_loss as mpo_temperature_loss
from framework.losses.mpo import mpo_weights as mpo_weights
from framework.losses.munchausen import munchausen_errors as munchausen_errors
from framework.losses.munchausen import munchausen_next_values as munchausen_next_values
from framework.losses.munchausen import munchausen_rewards as munchausen_rewards
from framework.losses.offline import calibrated_values as calibrated_values
from framework.losses.offline import conservative_penalty as conservative_penalty
from framework.losses.offline import expectile_loss as expectile_loss
from framework.losses.offline import gradient_similarity as gradient_similarity
from framework.losses.offline import sampled_conservative_penalty as sampled_conservative_penalty
from framework.losses.policy import Surrogate as Surrogate
from framework.losses.policy import adapt_kl_coefficient as adapt_kl_coefficient
from framework.losses.policy import clipped_surrogate as clipped_surrogate
from framework.losses.policy import clipped_value_loss as clipped_value_loss
from framework.losses.policy import explained_variance as explained_variance
from framework.losses.policy import impact_surrogate as impact_surrogate
from framework.losses.policy import kl_penalty_surrogate as kl_penalty_surrogate
from framework.losses.policy import masked_mean as masked_mean
from framework.losses.policy import normalize_advantages as normalize_advantages
from framework.losses.policy import policy_gradient_loss as policy_gradient_loss
from framework.losses.policy import value_loss as value_loss
from framework.losses.q_learning import double_q_errors as double_q_errors
from framework.losses.q_learning import huber as huber
from framework.losses.q_learning import importance_weights as importance_weights
from framework.losses.q_learning import item_priorities as item_priorities
from framework.losses.q_learning import q_learning_errors as q_learning_errors
from framework.losses.rescaling import inverse_value_rescaling as inverse_value_rescaling
from framework.losses.rescaling import sequence_priorities as sequence_priorities
from framework.losses.rescaling import value_rescaling as value_rescaling
from framework.losses.returns import VTrace as VTrace
from framework.losses.returns import clipped_rewards as clipped_rewards
from framework.losses.returns import generalized_advantages as generalized_advantages
from framework.losses.returns import lambda_returns as lambda_returns
from framework.losses.returns import n_step_returns as n_step_returns
from framework.losses.returns import peng_q_lambda as peng_q_lambda
from framework.losses.returns import retrace as retrace
from framework.losses.returns import transition_mask as transition_mask
from framework.losses.returns import vtrace as vtrace
from framework.losses.returns import watkins_q_lambda as watkins_q_lambda
from framework.losses.sac import discrete_soft_value as discrete_soft_value
from framework.losses.sac import sac_actor_loss as sac_actor_loss
from framework.losses.sac import sac_critic_loss as sac_critic_loss
from framework.losses.sac import sac_discrete_actor_loss as sac_discrete_actor_loss
from framework.losses.sac import sac_temperature_loss as sac_temperature_loss
from framework.losses.sac import soft_value as soft_value
