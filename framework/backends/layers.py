"""Layers of Keras with their values as numpy arrays, and calls of them with other values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import tree

from framework import specs
from framework.parameters import Parameters
from framework.types import Nest


class KerasNetworks(dict[str, dict[str, np.ndarray]]):
    """The arrays of each variable, as `Learner.parameters` has them, and the layers that compute with them.

    `networks.NAME` is the layer NAME, which reads its values from the innermost `using` block, and else from
    its own Keras variables.

    Args:
      layers: the name of each variable to a built layer or model.
      spec: the spec of one env.
    """

    def __init__(self, layers: Mapping[str, Any], spec: specs.EnvironmentSpec):
        self.layers, self.spec = dict(layers), spec
        for name, layer in self.layers.items():
            self[name] = {
                f"{index}/{variable.name}": np.array(as_numpy(variable.value))
                for index, variable in enumerate(layer.variables)
            }

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["layers"][name]
        except KeyError:
            raise AttributeError(
                f"networks: got no layer {name!r}, expected one of {sorted(self)}."
            ) from None

    def leaves(self, names: Sequence[str] = (), arrays: Parameters | None = None) -> list[np.ndarray]:
        """The arrays of these variables, or of all, in the order of `variables`; of `arrays`, if given."""
        held = self if arrays is None else arrays
        pairs = [zip(self.layers[name].variables, held[name].values(), strict=True) for name in names or self]
        return list({id(variable): leaf for each in pairs for variable, leaf in each}.values())

    def variables(self, names: Sequence[str] = ()) -> list[Any]:
        """The Keras variables of these variables, or of all; one that layers share is there once."""
        every = [variable for name in names or self for variable in self.layers[name].variables]
        return list({id(variable): variable for variable in every}.values())

    def named(self, names: Sequence[str], values: Sequence[Any]) -> dict[str, dict[str, np.ndarray]]:
        """Inverts `leaves`, for arrays of any back end."""
        held = dict(zip(map(id, self.variables(names)), map(as_numpy, values), strict=True))
        pairs = {name: zip(self[name], self.layers[name].variables, strict=True) for name in names}
        return {name: {key: held[id(variable)] for key, variable in each} for name, each in pairs.items()}


@contextlib.contextmanager
def using(variables: Sequence[Any], values: Sequence[Any]) -> Iterator[Any]:
    """Layers with these Keras variables compute with `values`; yields the `keras.StatelessScope`."""
    import keras

    with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))) as scope:
        yield scope


def mlp(
    spec: specs.EnvironmentSpec,
    hidden_sizes: Sequence[int],
    output_size: int,
    activation: str = "relu",
    layer_norm: bool = False,
    initializers: tuple[Any, Any] = (None, None),
) -> Any:
    """A built `keras.Sequential` of dense layers, `[B, *shape]` to `[B, output_size]`.

    Args:
      spec: the spec of one env, whose observation is one array of floats.
      hidden_sizes: widths of the hidden layers.
      output_size: width of the last layer, which has no activation.
      activation: Keras's name of the activation of the hidden layers.
      layer_norm: normalizes each hidden layer before its activation.
      initializers: functions that make the initializers of the weights of the hidden layers and of the last
        one. None: torch's default for linear layers, uniform with variance `1 / (3 * inputs)`.

    Raises:
      ValueError: The observation is no array of floats.
    """
    from keras import Sequential, layers
    from keras import initializers as starts

    observation = spec.observations
    if tree.is_nested(observation) or np.dtype(observation.dtype).kind != "f":
        raise ValueError(
            f"observation: got {observation!r}, expected one array of floats. Give networks_fn, which makes "
            "layers for other observations."
        )
    default = lambda: starts.VarianceScaling(1 / 3, "fan_in", "uniform")  # noqa: E731
    hidden, last = (make or default for make in initializers)
    parts: list[Any] = [layers.Flatten()]
    for size in hidden_sizes:
        parts.append(layers.Dense(size, kernel_initializer=hidden()))
        parts += [layers.LayerNormalization(epsilon=1e-5)] if layer_norm else []
        parts.append(layers.Activation(activation))
    model = Sequential([*parts, layers.Dense(output_size, kernel_initializer=last())])
    model.build((None, *observation.shape))
    return model


def floats(nest: Nest) -> Nest:
    """The nest with all floats in Keras's `floatx`."""
    import keras

    dtype = np.dtype(keras.config.floatx())

    def convert(leaf: Any) -> np.ndarray:
        leaf = np.asarray(leaf)  # A batch's tensors share memory with such arrays.
        return leaf.astype(dtype) if leaf.dtype.kind == "f" else leaf

    return tree.map_structure(convert, nest)


def as_numpy(value: Any) -> np.ndarray:
    """An array of any back end, without a gradient, as numpy's."""
    return value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
