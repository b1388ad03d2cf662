"""Conversion between nests of numpy arrays and nests of tensors."""

from __future__ import annotations

import numpy as np
import torch
import tree

from framework.types import Nest


def as_tensors(nest: Nest, device: str | torch.device = "cpu") -> Nest:
    """Arrays to tensors on `device`, without a copy where memory can be shared."""
    if isinstance(nest, np.ndarray):
        # torch warns about, and cannot protect, memory that must not be written.
        return torch.from_numpy(nest if nest.flags.writeable else nest.copy()).to(device)
    if tree.is_nested(nest):
        return tree.map_structure(lambda leaf: as_tensors(leaf, device), nest)
    return torch.as_tensor(nest, device=device)


def as_numpy(nest: Nest) -> Nest:
    """Tensors, wherever they are, to arrays."""
    if isinstance(nest, torch.Tensor):
        return nest.detach().cpu().numpy()
    if type(nest) is dict:  # dm-tree costs more than these conversions
        return {name: as_numpy(entry) for name, entry in nest.items()}
    return tree.map_structure(as_numpy, nest)
