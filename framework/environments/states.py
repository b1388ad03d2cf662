"""Environments as bytes: pickles that keep the state of every environment that can be pickled."""

from __future__ import annotations

import copyreg
import io
from typing import Any

import cloudpickle


class StatePickler(cloudpickle.Pickler):
    """Pickles gymnasium's `EzPickle` environments, MuJoCo's among them, with all of their attributes."""

    def __init__(self, file: io.BytesIO, protocol: int | None = 5):
        from gymnasium.utils import EzPickle  # gymnasium takes 0.2 s to import

        super().__init__(file, protocol=protocol)
        self._ez_pickle = EzPickle

    def reducer_override(self, obj: Any) -> Any:
        # EzPickle's own pickles hold the arguments of the constructor only: the state would be lost.
        if isinstance(obj, self._ez_pickle) and type(obj).__getstate__ is self._ez_pickle.__getstate__:
            return copyreg.__newobj__, (type(obj),), vars(obj), None, None, _set_attributes  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def _set_attributes(instance: Any, attributes: dict[str, Any]) -> None:
    vars(instance).update(attributes)


def dumps(environment: Any) -> bytes:
    """Returns the pickle of `environment`, which `pickle.loads` restores."""
    buffer = io.BytesIO()
    StatePickler(buffer).dump(environment)
    return buffer.getvalue()
