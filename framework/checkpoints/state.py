"""States as files with data and no code: written with `torch.save`, read with `weights_only=True`.

Torch's safe reader supports tensors, numbers, strings and plain containers. Numpy arrays and scalars are
stored as tensors with a mark. Saving refuses other types, so that the error does not appear only when the
state is needed. Torch is imported when a state is saved or loaded, so that replay can write checkpoints
without it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_ARRAY = "__numpy_array__"
_SCALAR = "__numpy_scalar__"
_PLAIN = (type(None), bool, int, float, str, bytes)  # exactly these types; enums derive from them


def torch_part(state: Any) -> Callable[[Path], None]:
    """Returns a part with `state`: nested dicts, lists and tuples of tensors, arrays and scalars.

    Writing it raises TypeError if `state` contains something else. The message names it.
    """

    def write(path: Path) -> None:
        import torch

        try:
            torch.save(pack(state), path)
        except RuntimeError:
            # Torch reports a failed write without its errno. A write of what it could not write raises the
            # system's OSError.
            with open(path, "ab") as probe:
                probe.write(bytes(1 << 20))
            raise

    return write


def load_state(path: str | Path) -> Any:
    """Returns a state that `torch_part` wrote, on the CPU."""
    import torch

    return unpack(torch.load(path, map_location="cpu", weights_only=True))


def pack(state: Any, where: str = "state") -> Any:
    """Returns the same nest without numpy types."""
    import torch

    if _is_plain(state):
        return state
    if isinstance(state, torch.Tensor):
        return state.detach()
    if isinstance(state, np.ndarray | np.generic):
        mark = _ARRAY if isinstance(state, np.ndarray) else _SCALAR
        try:
            return {mark: torch.from_numpy(np.array(state))}
        except (TypeError, ValueError) as error:  # The latter by the order of its bytes.
            raise TypeError(
                f"{where}: got dtype {state.dtype}, expected one that tensors have. Convert it."
            ) from error
    if type(state) in (dict, OrderedDict):
        for key in state:
            if not (_is_plain(key) or (type(key) is tuple and all(map(_is_plain, key)))):
                raise TypeError(f"{where}: got the key {key!r}, expected a string or number.")
        return type(state)((key, pack(value, f"{where}[{key!r}]")) for key, value in state.items())
    if type(state) in (list, tuple):
        return type(state)(pack(value, f"{where}[{index}]") for index, value in enumerate(state))
    raise TypeError(
        f"{where}: got a {type(state).__name__}, expected tensors, arrays, numbers, strings, dicts, lists or "
        "tuples. Convert it in save()."
    )


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN


def unpack(state: Any) -> Any:
    """Inverts `pack`."""
    if isinstance(state, dict):
        if state.keys() == {_ARRAY}:
            return state[_ARRAY].numpy()
        if state.keys() == {_SCALAR}:
            return state[_SCALAR].numpy()[()]
        return type(state)((key, unpack(value)) for key, value in state.items())
    if isinstance(state, list | tuple):
        return type(state)(unpack(value) for value in state)
    return state
