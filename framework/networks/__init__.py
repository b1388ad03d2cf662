"""Torch modules: encoders of observations, heads, and recurrent cores.

Importing this package imports torch; ``import framework`` does not.
"""

from framework.networks.encoders import NatureConv, ObservationEncoder
from framework.networks.mlp import MLP
from framework.networks.tensors import as_numpy, as_tensors
from framework.networks.values import QNetwork

__all__ = ["MLP", "NatureConv", "ObservationEncoder", "QNetwork", "as_numpy", "as_tensors"]
