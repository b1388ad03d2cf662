"""Torch modules: encoders of observations, recurrent cores, heads and distributions over actions.

Importing this package imports torch; `import framework` does not.
"""

from framework.networks.actor_critic import ActorCritic as ActorCritic
from framework.networks.control import DeterministicHead as DeterministicHead
from framework.networks.control import PolicyNetwork as PolicyNetwork
from framework.networks.control import SoftplusGaussianHead as SoftplusGaussianHead
from framework.networks.control import frozen as frozen
from framework.networks.control import restored as restored
from framework.networks.distributions import Categorical as Categorical
from framework.networks.distributions import DiagonalGaussian as DiagonalGaussian
from framework.networks.distributions import MultiCategorical as MultiCategorical
from framework.networks.distributions import SquashedGaussian as SquashedGaussian
from framework.networks.embeddings import EmbeddedCritics as EmbeddedCritics
from framework.networks.embeddings import EmbeddedPolicy as EmbeddedPolicy
from framework.networks.embeddings import StateActionEmbeddings as StateActionEmbeddings
from framework.networks.embeddings import avg_l1_norm as avg_l1_norm
from framework.networks.heads import Actions as Actions
from framework.networks.heads import CategoricalHead as CategoricalHead
from framework.networks.heads import Critics as Critics
from framework.networks.heads import GaussianHead as GaussianHead
from framework.networks.heads import MultiCategoricalHead as MultiCategoricalHead
from framework.networks.heads import QNetwork as QNetwork
from framework.networks.heads import SquashedGaussianHead as SquashedGaussianHead
from framework.networks.heads import as_numpy as as_numpy
from framework.networks.heads import as_tensors as as_tensors
from framework.networks.heads import holds_tensors as holds_tensors
from framework.networks.heads import make_policy_head as make_policy_head
from framework.networks.joint import Joint as Joint
from framework.networks.joint import JointActions as JointActions
from framework.networks.joint import make_actions as make_actions
from framework.networks.joint import make_squashed_actions as make_squashed_actions
from framework.networks.masks import check_action_mask as check_action_mask
from framework.networks.masks import epsilon_greedy as epsilon_greedy
from framework.networks.masks import legal_actions as legal_actions
from framework.networks.masks import mask_values as mask_values
from framework.networks.masks import masked_policy as masked_policy
from framework.networks.masks import random_actions as random_actions
from framework.networks.noisy import NoisyLinear as NoisyLinear
from framework.networks.noisy import redraw_noise as redraw_noise
from framework.networks.normalization import Moments as Moments
from framework.networks.normalization import ObservationNormalizer as ObservationNormalizer
from framework.networks.normalization import RewardScale as RewardScale
from framework.networks.quantiles import ImplicitQuantileNetwork as ImplicitQuantileNetwork
from framework.networks.recurrent import RecurrentEncoder as RecurrentEncoder
from framework.networks.recurrent import RecurrentQNetwork as RecurrentQNetwork
from framework.networks.torsos import ACTIVATIONS as ACTIVATIONS
from framework.networks.torsos import CONVOLUTIONS as CONVOLUTIONS
from framework.networks.torsos import MLP as MLP
from framework.networks.torsos import DataEfficientConv as DataEfficientConv
from framework.networks.torsos import NatureConv as NatureConv
from framework.networks.torsos import ObservationEncoder as ObservationEncoder
from framework.networks.torsos import RecurrentCore as RecurrentCore
from framework.networks.torsos import ResidualConv as ResidualConv
from framework.networks.torsos import ShallowConv as ShallowConv
from framework.networks.torsos import in_float32 as in_float32
