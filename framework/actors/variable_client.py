"""Keeps the networks of one process as fresh as its variable source lets it."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn


class VariableClient:
    """Asks a variable source for newer parameters and copies them into ``networks``.

    A variable is a child of ``networks`` by name; its value is that child's state dict in numpy. All
    copying is done inside ``update``, on the thread that calls it, so parameters never change in the
    middle of a forward pass. At most one request is under way; an answer that is not newer than what is
    here is dropped; an error of the source is raised by the next ``update``.

    Args:
      source: has ``get_variables(names, newer_than)``. If it also has ``futures`` (as clients of
        ``launch`` do), requests do not block; else it is called directly (a learner in the same thread).
      networks: what to keep fresh.
      names: the children of ``networks`` to ask for; none named means all of them.
      update_period: ask at every so many calls of ``update``. More means less traffic, older parameters.
      timeout: seconds that ``update(wait=True)`` waits for an answer; None waits for ever.
    """

    def __init__(
        self,
        source: Any,
        networks: nn.Module,
        names: Sequence[str] = (),
        update_period: int = 1,
        timeout: float | None = 60.0,
    ):
        if update_period < 1:
            raise ValueError(f"update_period is {update_period}; expected at least 1 call of update().")
        children = dict(networks.named_children())
        unknown = sorted(set(names) - set(children))
        if unknown:
            raise KeyError(f"names has {unknown}; the networks' children are {sorted(children)}.")
        self.version = -1
        self._source = source
        self._names = tuple(names) or tuple(children)
        self._targets = {name: children[name].state_dict() for name in self._names}
        self._update_period = update_period
        self._timeout = timeout
        self._calls = update_period - 1  # The very first update() asks.
        self._future: concurrent.futures.Future | None = None

    def update(self, wait: bool = False) -> bool:
        """Asks for newer parameters when it is time to, takes them over when they are there.

        Args:
          wait: ask now, whatever the period, and return only when the source has answered.

        Returns:
          whether the parameters changed.
        """
        changed = self._take() if self._future is not None and self._future.done() else False
        self._calls += 1
        if wait and self._future is not None:
            # An answer to an old question may be older than the caller's wish: wait it out, ask anew.
            concurrent.futures.wait([self._future], self._timeout)
            changed = self._take() or changed
        if self._future is None and (wait or self._calls >= self._update_period):
            self._calls = 0
            self._future = self._request()
            if wait:
                concurrent.futures.wait([self._future], self._timeout)
            if wait or self._future.done():
                changed = self._take() or changed
        return changed

    def _request(self) -> concurrent.futures.Future:
        futures = getattr(self._source, "futures", None)
        if futures is not None:
            return futures.get_variables(self._names, newer_than=self.version)
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_result(self._source.get_variables(self._names, newer_than=self.version))
        return future

    def _take(self) -> bool:
        assert self._future is not None
        if not self._future.done():
            raise TimeoutError(
                f"The variable source did not answer within {self._timeout} s; is the learner's node alive?"
            )
        future, self._future = self._future, None
        answer = future.result()
        if answer is None:
            return False
        version, variables = answer
        if version <= self.version:
            return False
        for name in self._names:
            if name not in variables:
                raise KeyError(f"The variable source sent {sorted(variables)}; {name!r} was asked for.")
            _copy_into(name, self._targets[name], variables[name])
        self.version = version
        return True


@torch.no_grad()
def _copy_into(name: str, target: dict[str, torch.Tensor], value: dict[str, np.ndarray]) -> None:
    if target.keys() != value.keys():
        odd = sorted(target.keys() ^ value.keys())
        raise ValueError(f"Variable {name!r}: entries {odd} are on one side only; are the networks the same?")
    for key, tensor in target.items():
        array = value[key]
        if tuple(array.shape) != tuple(tensor.shape):
            raise ValueError(
                f"Variable {name!r}, entry {key!r}: shape {tuple(array.shape)} came, the network here has "
                f"{tuple(tensor.shape)}; make both from the same config and spec."
            )
        tensor.copy_(torch.as_tensor(array))
