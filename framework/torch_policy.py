"""The base class of policies in PyTorch."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import torch
from torch import nn

from framework import core
from framework.networks import (
    Actions,
    BlockGenerator,
    JointActions,
    ObservationNormalizer,
    as_numpy,
    as_tensors,
    holds_tensors,
)
from framework.networks.modules import settle
from framework.own_settings import OwnSettings
from framework.types import Nest, Progress


class TorchPolicy(core.Policy):
    """A policy of torch modules: `act` gets tensors on the device of the networks.

    Args:
      networks: the networks, which each step reads and no step changes. They are put in evaluation mode.
        Hooks on them count from the policy's construction or from the next load of parameters. If they have
        an `ObservationNormalizer` as `normalizer`, `act` gets observations that it has scaled.
      actions: converts between sampled actions and the environment's.
      variables: names of the children of `networks` that `act` uses. Empty means all.

    Attributes:
      random: the generator of all random numbers in `act`, also for `networks.draw`; seeded, saved and
        restored with the policy.
    """

    takes_tensors = True

    def __init__(self, networks: nn.Module, actions: Actions | JointActions, variables: tuple[str, ...] = ()):
        self.networks = networks.eval()
        self.actions = actions
        self.variables = variables
        normalizer = getattr(networks, "normalizer", None)
        self._normalizer: ObservationNormalizer | None = None
        if isinstance(normalizer, ObservationNormalizer):
            self._normalizer = normalizer
            if variables and "normalizer" not in variables:
                self.variables = (*variables, "normalizer")
        self.device = next((p.device for p in networks.parameters()), torch.device("cpu"))
        self.random = BlockGenerator(self.device).manual_seed(0)
        self.settings = OwnSettings(networks.parameters())
        self._place = None if self.device.type == "cpu" else self.device
        self._versions = (-1, np.zeros(0, np.int64))
        settle(networks)

    @abc.abstractmethod
    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        """`(observation [B, ...], state)` to `(sampled actions [B, ...], extras [B, ...], next state)`.

        All are tensors on `device`, and the observation is `scaled`; extras may be arrays. No gradients are
        recorded.
        """

    def initial_state(self, batch_size: int) -> Nest:
        return ()

    def scaled(self, observation: Nest) -> Nest:
        """Tensors `[B, ...]` on `device`, as `act` takes them: normalized, if the networks normalize."""
        return observation if self._normalizer is None else self._normalizer(observation)

    def step(self, observation: Nest, state: Nest) -> tuple[Nest, Nest, Nest]:
        with self.settings, torch.inference_mode():
            drawn, extras, state = self.act(self.scaled(as_tensors(observation, self._place)), state)
            if not isinstance(observation, np.ndarray) and holds_tensors(observation):
                return self.actions.to_environment(drawn), as_numpy(extras), state
        return self.actions.to_environment(as_numpy(drawn)), as_numpy(extras), state

    def versions(self, drawn: torch.Tensor) -> np.ndarray:
        """The version of the parameters with each of the sampled actions, int64[B]."""
        version, known = self._versions
        if version != self.progress.version or known.shape[0] != drawn.shape[0]:
            version = self.progress.version
            known = np.full(drawn.shape[:1], version)
            self._versions = (version, known)  # The same array until one of them changes.
        return known

    def loaded(self, progress: Progress) -> None:
        super().loaded(progress)
        settle(self.networks)

    def seed(self, seed: int) -> None:
        self.random.manual_seed(seed)

    def save(self) -> dict[str, Any]:
        return self.random.save()

    def restore(self, state: dict[str, Any]) -> None:
        self.random.restore(state)
