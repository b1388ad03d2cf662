"""Torch modules: encoders of observations, recurrent cores, heads and distributions over actions.

Importing this package imports torch; `import framework` does not.
"""

from framework.networks.actions import Actions
from framework.networks.convolutions import NatureConv, ResidualConv, ShallowConv
from framework.networks.distributions import (
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    SquashedGaussian,
)
from framework.networks.encoders import ObservationEncoder
from framework.networks.heads import (
    CategoricalHead,
    GaussianHead,
    MultiCategoricalHead,
    SquashedGaussianHead,
    make_policy_head,
)
from framework.networks.mlp import ACTIVATIONS, MLP
from framework.networks.normalization import Moments, ObservationNormalizer, RewardScale
from framework.networks.plain import plain
from framework.networks.recurrent import RecurrentCore
from framework.networks.tensors import as_numpy, as_tensors
from framework.networks.values import Critics, QNetwork

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Actions",
    "Categorical",
    "CategoricalHead",
    "Critics",
    "DiagonalGaussian",
    "GaussianHead",
    "Moments",
    "MultiCategorical",
    "MultiCategoricalHead",
    "NatureConv",
    "ObservationEncoder",
    "ObservationNormalizer",
    "QNetwork",
    "RecurrentCore",
    "ResidualConv",
    "RewardScale",
    "ShallowConv",
    "SquashedGaussian",
    "SquashedGaussianHead",
    "as_numpy",
    "as_tensors",
    "make_policy_head",
    "plain",
]
