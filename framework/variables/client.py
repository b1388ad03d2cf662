"""Copies the parameters that a learner publishes into the networks of one process."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from typing import Any

from torch import nn

from framework import core
from framework.variables.block import VariableBlock, Variables, copy_variables


class VariableClient:
    """Copies newer parameters of the variables that `policy` names into `networks`.

    Only `update` copies, on the thread that calls it, so parameters never change during a forward pass. It
    sets the policy's `progress`.

    Args:
      source: a `VariableBlock`, or the client of a node with `variable_block()` and
        `get_variables(names, newer_than)`. The client reads a block directly if it can map it. Otherwise
        it sends one request at a time to the node, and the next `update` raises its error.
      networks: the networks to update.
      policy: its `variables` are the children of `networks` to copy. None copies all.
      update_period: number of calls of `update` between two requests for newer parameters.
      timeout: seconds that `update` waits for an answer of the node. None waits without a limit.
    """

    def __init__(
        self,
        source: Any,
        networks: nn.Module,
        policy: core.Policy | None = None,
        update_period: int = 1,
        timeout: float | None = 60.0,
    ):
        if update_period < 1:
            raise ValueError(f"update_period: got {update_period}, expected at least 1 call of update().")
        children = dict(networks.named_children())
        names = tuple(policy.variables if policy is not None else ()) or tuple(children)
        unknown = sorted(set(names) - set(children))
        if unknown:
            raise KeyError(f"variables: got {unknown}, expected some of {sorted(children)}.")
        self.version = -1
        self._source, self._policy = source, policy
        self._block = source if isinstance(source, VariableBlock) else None
        self._is_connected = self._block is not None
        self._targets = {name: children[name].state_dict() for name in names}
        self._update_period = update_period
        self._timeout = timeout
        self._calls = update_period - 1  # The first update() makes a request.
        self._request: concurrent.futures.Future | None = None

    def update(self, wait: bool = False) -> bool:
        """Copies newer parameters that have arrived, and requests newer ones every `update_period` calls.

        Args:
          wait: whether to request now and to block until the newest parameters are copied.

        Returns:
          Whether the parameters changed.
        """
        self._calls += 1
        due = wait or self._calls >= self._update_period
        if due and not self._is_connected:
            self._block = self._answer(self._source.futures.variable_block())
            self._is_connected = True
        progress = None
        if self._block is None:
            progress = self._exchange(due, wait)
        elif due:
            self._calls = 0
            progress = self._block.read(self._targets, self.version)
        if progress is None:
            return False
        self.version = progress.version
        if self._policy is not None:
            self._policy.progress = progress
        return True

    def state(self) -> dict[str, Any]:
        """Returns the parameters, their version and the calls since the last request, for `set_state`."""
        variables = {
            name: {key: tensor.detach().cpu().clone() for key, tensor in entries.items()}
            for name, entries in self._targets.items()
        }
        progress = core.Progress() if self._policy is None else self._policy.progress
        return {
            "variables": variables,
            "version": self.version,
            "calls": self._calls,
            "progress": tuple(progress),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned, into the networks too."""
        copy_variables(state["variables"], self._targets)
        self.version, self._calls = state["version"], state["calls"]
        if self._policy is not None:
            self._policy.progress = core.Progress(*state["progress"])

    def _exchange(self, due: bool, wait: bool) -> core.Progress | None:
        """Takes the answer of the node if it has arrived, and sends the next request if it is due."""
        progress = None
        if self._request is not None and (wait or self._request.done()):
            progress = self._take(self.version)
        if self._is_connected and self._request is None and due:
            # With `wait`, request again even if an answer has just arrived: its request may be older than
            # this call.
            self._calls = 0
            known = self.version if progress is None else progress.version
            self._request = self._source.futures.get_variables(tuple(self._targets), newer_than=known)
            if wait or self._request.done():
                progress = self._take(known) or progress
        return progress

    def _take(self, known: int) -> core.Progress | None:
        request, self._request = self._request, None
        variables: Variables | None = self._answer(request)
        if variables is None or variables.version <= known:
            return None
        copy_variables(variables.values, self._targets)
        return core.Progress(variables.version, variables.env_steps)

    def _answer(self, future: Any) -> Any:
        concurrent.futures.wait([future], self._timeout)
        if not future.done():
            raise TimeoutError(
                f"variables: got no answer of the learner's node within {self._timeout} s. Is it alive?"
            )
        return future.result()
