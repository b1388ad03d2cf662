"""Two halves of an actor's envs: one steps its environments while the actions of the other are computed.

::

    half 0     |env|adder|  ....  |env|adder|  ....  |env|adder|        ....  waits for its turn
    half 1        ....  |env|adder|  ....  |env|adder|
    inference  |--1--|  |--0--|   |--1--|  |--0--|                      always of the half that does not step

Each half is an environment, an adder and a loop of its own, as if it were a smaller actor; what they share
is where their actions come from. It pays where inference does not need the time that stepping needs: an
inference server, a GPU, environments in processes, networks so large that torch lets go of the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from framework import core
from framework.actors.inference_client import InferenceActor
from framework.environment_loop import EnvironmentLoop


class AlternatingLoop:
    """Takes turns between the loops of the halves; looks like an ``EnvironmentLoop`` to who drives it.

    One ``step`` is one batched step of *one* half.

    Args:
      loops: of the halves.
      actors: of the halves, in the same order.
      offsets: number of the first env of each half.
      hold_every: actions are not computed ahead for the step with this number, and each multiple of it (an
        unroll begins there, for which parameters may have to be awaited); None always computes ahead.
    """

    def __init__(
        self,
        loops: Sequence[EnvironmentLoop],
        actors: Sequence[InferenceActor],
        offsets: Sequence[int],
        hold_every: int | None = None,
    ):
        self._loops, self._actors, self._offsets = list(loops), list(actors), list(offsets)
        self._hold_every = hold_every
        self._steps = 0

    @property
    def turn(self) -> int:
        """The half that the next ``step`` is for."""
        return self._steps % len(self._loops)

    @property
    def num_steps(self) -> int:
        """Transitions made, over all envs."""
        return sum(loop.num_steps for loop in self._loops)

    def step(self, max_steps: int | None = None) -> dict[str, np.ndarray] | None:
        """One batched step of the half whose turn it is; see ``EnvironmentLoop.step``."""
        turn = self.turn
        self._steps += 1
        self._actors[turn].request()  # if nobody has asked yet
        if self._hold_every is None or self._steps % self._hold_every:
            self._actors[self.turn].request()  # is computed while this half steps
        finished = self._loops[turn].step(max_steps)
        if finished is not None:
            finished["env"] = finished["env"] + self._offsets[turn]
        return finished

    def take_seconds(self) -> dict[str, float]:
        """See ``EnvironmentLoop.take_seconds``; ``select_action`` is time spent waiting."""
        parts = [loop.take_seconds() for loop in self._loops]
        return {key: sum(part[key] for part in parts) for key in parts[0]}


class AlternatingActor(core.Saveable):
    """The actors of the halves, for what is done to both."""

    def __init__(self, actors: Sequence[InferenceActor]):
        self._actors = list(actors)

    def update(self, wait: bool = False) -> None:
        """Newer parameters; those of one half are those of all where they share them."""
        for actor in self._actors:
            actor.update(wait)

    def save(self) -> Any:
        return self._actors[0].save()

    def restore(self, state: Any) -> None:
        self._actors[0].restore(state)

    def close(self) -> None:
        """Lets go of all ports."""
        for actor in self._actors:
            actor.close()


class AlternatingAdder:
    """The adders of the halves, for what is done to both."""

    def __init__(self, adders: Sequence[Any]):
        self._adders = list(adders)
        self.loop: AlternatingLoop | None = None  # says whose turn it is; set by who makes both

    def ready(self) -> bool:
        """Whether the half whose turn it is could add a step without waiting."""
        return self._adder().ready()

    def ready_if_stuck(self) -> bool:
        """See `framework.adders.Adder.ready_if_stuck`; of the half whose turn it is."""
        return self._adder().ready_if_stuck()

    def _adder(self) -> Any:
        return self._adders[0 if self.loop is None else self.loop.turn]

    def flush(self, timeout: float | None = None) -> None:
        """Waits until the tables have the items of all, ``timeout`` seconds for each."""
        for adder in self._adders:
            adder.flush(timeout=timeout)

    def close(self, timeout: float | None = None) -> int:
        """Closes all; returns how many items were dropped."""
        return sum(adder.close(timeout=timeout) for adder in self._adders)


class AlternatingEnvironment:
    """The environments of the halves, for what is done to both."""

    def __init__(self, environments: Sequence[Any]):
        self._environments = list(environments)

    def save(self) -> Any:
        """The first one's state stays what it is, so that evaluators and other modes find it."""
        first, *others = (environment.save() for environment in self._environments)
        return {**first, _OTHERS: others} if any(others) else first

    def restore(self, state: Any) -> None:
        first = {key: value for key, value in state.items() if key != _OTHERS}
        others = state.get(_OTHERS) or [first] * (len(self._environments) - 1)
        for environment, part in zip(self._environments, [first, *others], strict=True):
            environment.restore(part)

    def close(self) -> None:
        """Closes all."""
        for environment in self._environments:
            environment.close()


_OTHERS = "other_halves"
