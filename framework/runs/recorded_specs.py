"""The specs of an environment in a run's `config.yaml`, which tell whether the environment has changed."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import numpy as np
import tree

from framework import specs
from framework.types import Nest

_MOST_VALUES = 100  # Bounds of more values are recorded as a hash.
_ALL: tuple[Any, ...] = (specs.Array, specs.BoundedArray, specs.DiscreteArray)
_KINDS = {kind.__name__: kind for kind in (*_ALL, specs.StackedArray, specs.StackedBoundedArray)}


def recorded(spec: specs.EnvironmentSpec) -> dict[str, Any]:
    """The observations and actions of `spec` as a file holds them: values, whatever the print options are.

    The names of the agents of a multi-agent environment are with them, for `restored`. So are the rewards of
    other environments, if they are several.
    """
    agents = list(specs.agents(spec))
    fields = ["observations", "actions", *["rewards"] * (tree.is_nested(spec.rewards) and not agents)]
    return {**{name: _recorded(getattr(spec, name)) for name in fields}, "agents": agents}


def restored(known: Any) -> specs.EnvironmentSpec | None:
    """The specs that were `recorded`, with the usual rewards, if there are no others, and discounts.

    None if the record does not say enough: an older version's, more bounds than a file holds, or a kind of
    spec that this package does not have.
    """
    if not isinstance(known, dict) or not isinstance(agents := known.get("agents"), list):
        return None
    try:
        observations, actions = [_restored(known[name], name[:-1]) for name in ("observations", "actions")]
    except (KeyError, TypeError, ValueError):
        return None
    usual = specs.Array((), np.float32, "reward"), specs.BoundedArray((), np.float32, 0.0, 1.0, "discount")
    rewards, discounts = [dict.fromkeys(agents, leaf) if agents else leaf for leaf in usual]
    if "rewards" in known:
        rewards = _restored(known["rewards"], "reward")
    return specs.EnvironmentSpec(observations, actions, rewards, discounts)


def whole(spec: specs.EnvironmentSpec) -> dict[str, Any]:
    """All of `spec` as a file holds it, for `spec_of`."""
    return {name: _recorded(getattr(spec, name), np.inf) for name in spec._fields}


def spec_of(content: Any) -> specs.EnvironmentSpec:
    """The spec that `whole` recorded.

    Raises:
      ValueError: The content is not one of `whole`.
    """
    try:
        fields = specs.EnvironmentSpec._fields
        return specs.EnvironmentSpec(*[_restored(content[name], name[:-1]) for name in fields])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"spec: got {str(content)[:200]}, expected one that was recorded: {error}"
        ) from error


def changed(known: Any, now: Any) -> str:
    """How the `recorded` specs differ: `observations/0: got …, expected …` for each leaf; empty if equal."""
    if isinstance(known, str):  # Up to format 3. The bounds in it depend on the print options of its program.
        shapes = re.findall(r"shape=\(([\d, ]*)\), dtype=(?:dtype\(')?(\w+)", known)
        sizes = re.findall(r"num_values=(\d+)", known)
        leaves = _leaves(now).values()
        fits = sorted((re.findall(r"\d+", shape), dtype) for shape, dtype in shapes) == sorted(
            ([*map(str, leaf["shape"])], leaf["dtype"]) for leaf in leaves
        ) and sorted(sizes) == sorted(str(leaf["num_values"]) for leaf in leaves if "num_values" in leaf)
        return "" if fits else f"got {', '.join(map(_text, leaves))}, expected {known}"
    got, expected = _leaves(now), _leaves(known)
    return "; ".join(
        f"{name}: got {_text(got.get(name))}, expected {_text(expected.get(name))}"
        for name in {**expected, **got}
        if _text(got.get(name)) != _text(expected.get(name))
    )


def _recorded(spec: Nest, most: float = _MOST_VALUES) -> Any:
    if isinstance(spec, dict):
        return {str(name): _recorded(child, most) for name, child in spec.items()}
    if isinstance(spec, tuple | list):
        return [_recorded(child, most) for child in spec]
    leaf = {"kind": type(spec).__name__, "shape": list(spec.shape), "dtype": np.dtype(spec.dtype).name}
    if isinstance(spec, specs.DiscreteArray):
        leaf["num_values"] = int(spec.num_values)
    elif isinstance(spec, specs.BoundedArray):
        leaf |= {"minimum": _bound(spec.minimum, most), "maximum": _bound(spec.maximum, most)}
    return leaf


def _restored(known: Any, name: str) -> Nest:
    if isinstance(known, list):
        return tuple(_restored(child, f"{name}/{index}") for index, child in enumerate(known))
    if not isinstance(known.get("kind"), str):
        return {key: _restored(child, f"{name}/{key}") for key, child in known.items()}
    kind, shape, dtype = _KINDS[known["kind"]], tuple(known["shape"]), np.dtype(known["dtype"])
    if kind is specs.DiscreteArray:
        return kind(known["num_values"], dtype, name=name)
    # The hash in place of many bounds is no number, so there is an error here.
    bounds = [np.asarray(known[each], dtype) for each in ("minimum", "maximum") if each in known]
    return kind(shape, dtype, *bounds, name=name)


def _bound(bound: Any, most: float) -> Any:
    """One number if all are equal, else a list of them or, for many, their hash."""
    array = np.asarray(bound)
    if array.size and (array == array.flat[0]).all():
        array = array.flat[0]
    if array.size <= most:
        return array.tolist()
    return f"sha256 {hashlib.sha256(array.astype(array.dtype.newbyteorder('<')).tobytes()).hexdigest()}"


def _leaves(nest: Any, name: str = "") -> dict[str, Any]:
    """The recorded leaves of a nest by their place in it."""
    if isinstance(nest, dict) and isinstance(nest.get("kind"), str):
        return {name: nest}
    pairs = nest.items() if isinstance(nest, dict) else enumerate(nest if isinstance(nest, list) else ())
    found: dict[str, Any] = {}
    for key, child in pairs:
        found |= _leaves(child, f"{name}/{key}".lstrip("/"))
    return found


def _text(leaf: Any) -> str:
    return "no such part" if leaf is None else json.dumps(leaf, default=str)
