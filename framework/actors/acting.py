"""The actor of all agents: a policy that acts, and an adder that takes the experience."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import tree

from framework import core
from framework.adders import Adder
from framework.config_checks import whole_number
from framework.environments.rows import TimeStepRows
from framework.foreign import copies, is_foreign
from framework.own_settings import OwnSettings
from framework.types import Nest

_ROWS = 63  # The last row of an actor without an adder.


class PolicyActor(core.Actor):
    """Acts for `num_envs` envs with `policy`, writes experience to `adder`, and updates parameters.

    An env's recurrent state restarts with its episode, and an agent's with the agent's own episode; see
    `Policy.begins`. The extras that the policy returns with an action are stored in the row of that action.
    The calls have the order that `framework.components` shows:

    ```python
    actor = PolicyActor(policy, adder, VariableClient(learner_client, networks), num_envs=4, seed=1)
    actor.observe_first(timestep)
    action = actor.select_action(timestep.observation)
    actor.observe(action, environment.step(action))
    actor.update()
    ```

    Args:
      policy: chooses actions; a pure step.
      adder: takes the experience. None discards it, as in an evaluator. The attribute may be replaced
        before `observe_first`.
      variable_client: updates the networks of the policy. None does not update them.
      num_envs: number of envs of the environment, B.
      seed: seeds the policy's random choices. None does not seed them.
      offset: index of the first of these envs among all envs that act with this kind of policy. Policies may
        treat envs differently.
      total: number of all envs that act with this kind of policy. None means `offset + num_envs`.

    Attributes:
      state: the policy's state before the next actions; None before `observe_first`.
    """

    def __init__(
        self,
        policy: core.Policy,
        adder: Any = None,
        variable_client: Any = None,
        num_envs: int = 1,
        seed: int | None = None,
        offset: int = 0,
        total: int | None = None,
    ):
        self.policy = policy
        self.num_envs = whole_number("num_envs", num_envs, 1)
        self._offset, self._total = offset, offset + num_envs if total is None else total
        self.adder = adder
        self._copies = False  # Whether it gets copies, because it is of another package.
        self._stages = False  # Whether it is an `Adder`, which may have staged steps for too long.
        self._variable_client = variable_client
        self.state: Nest = None
        self._has_memory = False
        self._extras: Nest = ()
        self._rows: TimeStepRows | None = None  # An actor with an adder has its.
        self._is_own = not (is_foreign(policy) or is_foreign(self))
        if seed is not None:
            policy.seed(seed)

    def ready(self) -> bool:
        """Whether the next `observe` can run without waiting for replay."""
        return self.adder is None or self.adder.ready()

    def time_step_rows(self) -> TimeStepRows | None:
        """Rows into which the environment may write the next time steps; see `Adder.time_step_rows`.

        None where a policy or an adder of another package sees them: they may change what they get. None
        before `observe_first`, too, if there is an adder.
        """
        if not self._is_own:
            return None
        if self.adder is None:
            return self._rows
        return self.adder.time_step_rows() if self._stages and not self._copies else None

    def observe_first(self, timestep: Any) -> None:
        self.state = self._initial_state()
        self._has_memory = bool(tree.flatten(self.state))
        self._extras = ()
        if self.adder is not None:
            self._copies, self._stages = is_foreign(self.adder), isinstance(self.adder, Adder)
            self.adder.add_first(copies(timestep) if self._copies else timestep)
        elif self._rows is not None:
            self._rows.restart(0)
        elif self._is_own:
            self._rows = TimeStepRows(timestep, 0, _ROWS)

    def select_action(self, observation: Nest) -> Nest:
        if self.state is None:
            raise RuntimeError("select_action() came before observe_first(); give it the first time step.")
        action, self._extras, self.state = self.policy.step(observation, self.state)
        if self._stages and self.adder is not None:  # The step of the environment may take long.
            self.adder.flush_pending(late=True)
        return action

    def observe(self, action: Nest, next_timestep: Any) -> None:
        if self.adder is not None:
            given = action, next_timestep, self._extras
            self.adder.add(*(copies(given) if self._copies else given))
        elif self._rows is not None:
            self._rows.advance()
        if self._has_memory:
            begins = self.policy.begins(next_timestep)
            if any(np.count_nonzero(mask) for mask in tree.flatten(begins)):
                self.state = restarted(self.state, self._initial_state(), begins)

    def flush_pending(self) -> None:
        if self._stages and self.adder is not None:
            self.adder.flush_pending()

    def _initial_state(self) -> Nest:
        with OwnSettings():
            states = self.policy.initial_state(self._total)
        mine = slice(self._offset, self._offset + self.num_envs)
        return tree.map_structure(lambda leaf: leaf[mine], states)

    def update(self, wait: bool = False) -> None:
        if self._variable_client is not None:
            self._variable_client.update(wait)


def copied(leaf: np.ndarray | torch.Tensor) -> np.ndarray | torch.Tensor:
    """Returns a copy of an array, or of a tensor on its device."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else np.array(leaf)


def restarted(state: Nest, initial: Nest, begins: Nest) -> Nest:
    """Returns `state` with the rows that `begins` marks taken from `initial`; see `Policy.begins`.

    The leaves are copied, not written in place, because the extras of an action may refer to the old ones.
    """

    def restart_part(mask: np.ndarray, part: Nest, fresh: Nest) -> Nest:
        where = np.nonzero(mask)

        def restart(old: Any, new: Any) -> Any:  # Arrays or tensors.
            copy = copied(old)
            copy[where] = new[where]
            return copy

        return tree.map_structure(restart, part, fresh) if len(where[0]) else part

    return tree.map_structure_up_to(begins, restart_part, begins, state, initial)
