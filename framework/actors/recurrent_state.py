"""The recurrent state of envs that begin an episode."""

from __future__ import annotations

import numpy as np
import torch
import tree

from framework.types import Nest


def copied(leaf: np.ndarray | torch.Tensor) -> np.ndarray | torch.Tensor:
    """Returns a copy of an array, or of a tensor on its device."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else np.array(leaf)


def restart_envs(state: Nest, initial: Nest, envs: np.ndarray) -> Nest:
    """Returns `state` (leaves `[B, ...]`) with the rows `envs` (int64 `[k]`) taken from `initial`.

    The leaves are copied, not written in place, because the extras of an action may refer to the old ones.
    """

    def restart(old: np.ndarray | torch.Tensor, new: np.ndarray | torch.Tensor) -> np.ndarray | torch.Tensor:
        copy = copied(old)
        copy[envs] = new[envs]
        return copy

    return tree.map_structure(restart, state, initial) if len(envs) else state
