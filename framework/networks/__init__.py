"""Torch modules: encoders of observations, recurrent cores, heads and distributions over actions.

Importing this package imports torch; `import framework` does not.
"""

from framework.networks.distributions import (
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    SquashedGaussian,
)
from framework.networks.heads import (
    Actions,
    CategoricalHead,
    Critics,
    GaussianHead,
    MultiCategoricalHead,
    QNetwork,
    SquashedGaussianHead,
    as_numpy,
    as_tensors,
    make_policy_head,
)
from framework.networks.normalization import Moments, ObservationNormalizer, RewardScale
from framework.networks.torsos import (
    ACTIVATIONS,
    MLP,
    NatureConv,
    ObservationEncoder,
    RecurrentCore,
    ResidualConv,
    ShallowConv,
)

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
]
