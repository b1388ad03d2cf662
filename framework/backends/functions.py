"""What differs between the back ends of Keras: gradients and static graphs. All else is `keras.ops`.

A process has one back end, which the first import of Keras decides. Nothing here imports TensorFlow or JAX
but the `Functions` of that back end.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from launch import extras

# Arrays of a back end, other arguments: the loss, and what else comes with it.
Loss = Callable[..., tuple[Any, Any]]
_EXTRAS = {"torch": "keras", "tensorflow": "keras-tensorflow", "jax": "keras-jax"}
BACKENDS = tuple(_EXTRAS)


class Functions(abc.ABC):
    """What a learner and a policy need of a back end beside `keras.ops`.

    Attributes:
      compiles_policies: whether the function of a policy is compiled with the learner's.
    """

    compiles_policies: ClassVar[bool] = True

    @abc.abstractmethod
    def array(self, value: np.ndarray) -> Any:
        """A copy of `value` as an array of the back end."""

    @abc.abstractmethod
    def gradient(self, loss: Loss) -> Callable[..., tuple[tuple[Any, Any], Sequence[Any]]]:
        """`loss(values, *others)` with its gradients: `((loss, aux), gradients of the list values)`."""

    @abc.abstractmethod
    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, a function of nests of arrays, as a static graph."""


class _Torch(Functions):
    compiles_policies = False  # Each process would compile for a minute.

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def array(self, value: np.ndarray) -> Any:
        return self._torch.tensor(value)

    def gradient(self, loss: Loss) -> Callable[..., Any]:
        torch = self._torch

        def run(values: Sequence[Any], *others: Any) -> Any:
            leaves = [value.detach().requires_grad_() for value in values]
            result = loss(leaves, *others)
            gradients = torch.autograd.grad(result[0], leaves, materialize_grads=True)
            return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result), gradients

        return run

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self._torch._dynamo.config.trace_autograd_ops = True
        return self._torch.compile(function, fullgraph=True, options={"compile_threads": 1})


class _TensorFlow(Functions):
    def __init__(self) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        import tensorflow

        self._tf = tensorflow
        with contextlib.suppress(RuntimeError):  # This process has computed with TensorFlow, such as `as_tf`.
            tensorflow.config.set_visible_devices([], "GPU")
            if threads := int(os.environ.get("OMP_NUM_THREADS") or 0):
                tensorflow.config.threading.set_intra_op_parallelism_threads(threads)
                tensorflow.config.threading.set_inter_op_parallelism_threads(threads)

    def array(self, value: np.ndarray) -> Any:
        return self._tf.constant(value)

    def gradient(self, loss: Loss) -> Callable[..., Any]:
        def run(values: Sequence[Any], *others: Any) -> Any:
            with self._tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(values)
                result = loss(values, *others)
            return result, tape.gradient(result[0], values, unconnected_gradients="zero")

        return run

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._tf.function(function, autograph=False)


class _JAX(Functions):
    def __init__(self) -> None:
        if os.environ.get("OMP_NUM_THREADS") == "1":
            flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import jax

        self._jax = jax

    def array(self, value: np.ndarray) -> Any:
        return self._jax.numpy.array(value)

    def gradient(self, loss: Loss) -> Callable[..., Any]:
        return self._jax.value_and_grad(loss, has_aux=True)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._jax.jit(function)


_CLASSES: dict[str, type[Functions]] = {"torch": _Torch, "tensorflow": _TensorFlow, "jax": _JAX}


@functools.cache
def load(backend: str) -> Functions:
    """Imports Keras on `backend`, on the CPU, and returns the back end's functions.

    Raises:
      ImportError: The back end is not installed.
      ValueError: This process uses Keras on another back end.
    """
    loaded = sys.modules.get("keras")
    if loaded is not None and (own := loaded.backend.backend()) != backend:
        raise ValueError(
            f"backend: got {backend!r}, expected {own!r}, on which this process has "
            "imported Keras. Start a new process, or use engine 'processes'."
        )
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("KERAS_TORCH_DEVICE", "cpu")
    try:
        functions = _CLASSES[backend]()
        importlib.import_module("keras")
    except ImportError as error:
        raise ImportError(f"backend: {error}. Run {extras.install(_EXTRAS[backend])}.") from error
    return functions
