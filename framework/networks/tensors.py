"""Between nests of numpy arrays and nests of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import tree

from framework.types import Nest


def as_tensors(nest: Nest, device: str | torch.device = "cpu") -> Nest:
    """Arrays to tensors on ``device``, without a copy where memory can be shared."""
    if isinstance(nest, np.ndarray):
        # Most observations are one array, and dm-tree costs more than this conversion.
        return _as_tensor(nest, device)
    return tree.map_structure(lambda leaf: _as_tensor(leaf, device), nest)


def as_numpy(nest: Nest) -> Nest:
    """Tensors, wherever they are, to arrays."""
    return tree.map_structure(lambda leaf: leaf.detach().cpu().numpy(), nest)


def _as_tensor(leaf: Any, device: str | torch.device) -> torch.Tensor:
    if not isinstance(leaf, np.ndarray):
        return torch.as_tensor(leaf, device=device)
    if not leaf.flags.writeable:
        leaf = leaf.copy()  # torch warns about, and cannot protect, memory that must not be written.
    return torch.from_numpy(leaf).to(device)
