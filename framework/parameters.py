"""The parameters of networks as numpy arrays with names: `{variable: {entry: array}}`.

In torch, a variable is a child of the networks, and its entries are the child's state dict. Networks without
torch are such a nest of arrays themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Name of a variable, name of its entry, value.
Parameters = Mapping[str, Mapping[str, Any]]


def as_array(value: Any) -> Any:
    """A tensor or array as an array: a view of its memory if it is on the CPU, a copy from another device.

    Numpy has no bfloat16, so such a tensor becomes a copy in float32, which has all of its values.
    """
    if isinstance(value, np.ndarray):
        return value
    try:
        return value.numpy(force=True)
    except TypeError:
        return value.float().numpy(force=True)


def arrays_of(parameters: Parameters) -> dict[str, dict[str, np.ndarray]]:
    """The same nest with each tensor `as_array`."""
    return {name: {key: as_array(leaf) for key, leaf in each.items()} for name, each in parameters.items()}


class NamedArrays:
    """Variables of `networks`, as arrays for newer values.

    ```python
    copy_variables(newer, named.arrays)
    named.loaded()
    ```

    Args:
      networks: a torch module, or a nest of arrays.
      names: the variables. Empty means all.

    Attributes:
      values: the tensors or arrays of the networks, by variable and entry.
      arrays: the same as arrays. The networks use their memory where `as_array` gives a view.

    Raises:
      KeyError: `networks` has no variable of a name.
    """

    def __init__(self, networks: Any, names: Sequence[str] = ()):
        is_nest = isinstance(networks, Mapping)
        known = networks if is_nest else {name: each.state_dict() for name, each in networks.named_children()}
        if unknown := sorted(set(names) - set(known)):
            raise KeyError(f"variables: got {unknown}, expected some of {sorted(known)}.")
        self.values = {name: known[name] for name in names or known}
        self.arrays = arrays_of(self.values)
        pairs = zip(state_of(self.values).values(), state_of(self.arrays).values(), strict=True)
        self._elsewhere = [(v, a) for v, a in pairs if v is not a and v.data_ptr() != a.ctypes.data]

    def loaded(self) -> None:
        """Copies the arrays into the tensors that do not share their memory."""
        for tensor, array in self._elsewhere:
            tensor.copy_(tensor.new_tensor(array))


def state_of(networks: Any) -> dict[str, Any]:
    """The state dict of a torch module; the arrays of a nest, by `VARIABLE.ENTRY`. Neither is copied."""
    if isinstance(networks, Mapping):
        return {f"{name}.{key}": leaf for name, each in networks.items() for key, leaf in each.items()}
    return dict(networks.state_dict())


def load_state(networks: Any, state: Mapping[str, Any]) -> None:
    """Copies tensors or arrays into the entries of `state_of(networks)`. The others stay as they are."""
    own = state_of(networks)
    if isinstance(networks, Mapping):
        for name, value in state.items():
            np.copyto(own[name], as_array(value))
    else:
        import torch

        networks.load_state_dict(own | {name: torch.as_tensor(value) for name, value in state.items()})
