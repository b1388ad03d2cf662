"""Parts of networks on devices of their own.

```python
SGDLearner(networks, loss_fn, optimizer_fn, device="cuda:0", devices={"policy": "cpu"})
```

Each part computes on its device: the tensors of a call cross to it, and its results cross back to the device
of the caller, which is the learner's or an outer part's. Autograd records both, so gradients cross
the other way.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Mapping
from typing import Any

import torch
import tree
from torch import nn

from framework.config_checks import flat_names, nearest


class Crossings(threading.local):
    """What crosses between the devices of some networks, in this thread.

    Attributes:
      device: the device on which code computes now.
      crossed: bytes that crossed between devices, forward and, with gradients, backward.
    """

    def __init__(self, device: torch.device, moves: bool):
        self.device, self.moves, self.crossed = device, moves, 0

    def __deepcopy__(self, memo: Any) -> Crossings:
        return self  # Targets, which are copies, count here, too.

    def __reduce__(self) -> Any:
        return Crossings, (self.device, self.moves)

    def to(self, device: torch.device, nest: Any) -> Any:
        """`nest` with its tensors on `device`: those in containers, and attributes of distributions."""
        if isinstance(nest, torch.Tensor):
            if self.moves and nest.device == device:
                return nest
            needs = nest.requires_grad and torch.is_grad_enabled()
            self.crossed += nest.nbytes * (2 if needs else 1)
            return nest.to(device) if self.moves else nest
        if tree.is_nested(nest):
            return tree.map_structure(functools.partial(self.to, device), nest)
        attributes = getattr(nest, "__dict__", None)
        if not attributes or callable(nest) or isinstance(nest, torch.Generator):
            return nest
        moved = copy.copy(nest)
        vars(moved).update({name: self.to(device, value) for name, value in attributes.items()})
        return moved


class _Method:
    """A method of a part: it computes on the device of the part."""

    def __init__(self, part: nn.Module, name: str, device: torch.device, crossings: Crossings):
        self._part, self._name, self._device, self._crossings = part, name, device, crossings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind, crossings = type(self._part), self._crossings
        method = inspect.getattr_static(kind, self._name).__get__(self._part, kind)
        if (caller := crossings.device) == self._device:
            return method(*args, **kwargs)
        crossings.device = self._device
        try:
            args, kwargs = crossings.to(self._device, (args, kwargs))
            made = method(*args, **kwargs)
        finally:
            crossings.device = caller
        return crossings.to(caller, made)


def resolved(networks: nn.Module, devices: Mapping[str, Any]) -> dict[str, str]:
    """The device of each module of `networks` that has one of its own, by the module's name.

    Args:
      networks: the networks.
      devices: beginnings of names of modules to devices; the longest one that fits counts.

    Raises:
      ValueError: No name begins so. The text names it.
    """
    devices, modules = flat_names(devices), dict(networks.named_modules())
    del modules[""]
    for prefix in devices:
        if not any(name.startswith(prefix) for name in modules):
            children = ", ".join(name for name, _ in networks.named_children())
            raise ValueError(
                f"devices: got {prefix!r}, expected the beginning of the name of a part of the networks: "
                f"{children}, or of one inside them.{nearest(prefix, modules)}"
            )
    own = {}
    for name, module in modules.items():
        if fits := [prefix for prefix in devices if name.startswith(prefix)]:
            prefix = max(fits, key=len)
            own[name] = devices[prefix]
            if not _methods(type(module)) and next(module.parameters(recurse=False), None) is not None:
                raise ValueError(
                    f"devices: got {prefix!r} for {name}, expected a part that is called: the loss reads its "
                    "parameters. Leave it on the device of the learner."
                )
    return own


def place(
    networks: nn.Module, device: str | torch.device, devices: Mapping[str, Any], moves: bool = True
) -> Crossings:
    """Puts parts of `networks` on their devices. See `resolved` for `devices` and what is raised.

    Args:
      networks: the networks, which are on `device`.
      device: device of the code that calls them.
      devices: of the parts.
      moves: whether tensors are moved. If not, they are only counted, for devices that are not here.
    """
    crossings, own = Crossings(_exact(device), moves), resolved(networks, devices)
    for name, part in networks.named_modules():
        if not name:
            continue
        where = _exact(own.get(name, device))
        if moves:
            part._apply(lambda tensor, where=where: tensor.to(where), recurse=False)
        for method in _methods(type(part)):
            setattr(part, method, _Method(part, method, where, crossings))
    return crossings


def _methods(kind: type[nn.Module]) -> set[str]:
    """What others call of a module: `forward`, and the public methods that not every module has."""
    ours = [each for each in kind.__mro__ if not each.__module__.startswith("torch.")]
    public = {name for each in ours for name, value in vars(each).items() if inspect.isfunction(value)}
    called: set[str] = set() if kind.forward is nn.Module.forward else {"forward"}
    return called | {name for name in public if name[0] != "_" and not hasattr(nn.Module, name)}


def _exact(device: str | torch.device) -> torch.device:
    """`cuda` is `cuda:0`, as tensors have it."""
    made = torch.device(device)
    return torch.device(made.type, made.index or 0) if made.type == "cuda" else made
