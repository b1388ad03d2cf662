"""The gradient of a loss as CUDA graphs, which a GPU computes without waiting for Python."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import tree
from torch import nn

from framework.learners.context import LossContext, LossOutput
from framework.learners.gradient import CompiledGradient, LossGradient
from framework.networks.control import restored

_WARM_UP_STEPS = 3
_MOST_SIZES = 16  # Each graph holds memory.


class CapturedGradient:
    """A `LossGradient` as CUDA graphs: one for each combination of choices and of sizes.

    A graph reads its inputs from tensors of its own, into which each call copies. The gradients stay valid
    until the next call. Once there are graphs for 16 sizes of batches, the loss is computed as it is written
    for batches of others.

    Args:
      gradient: the gradient, on a GPU.

    Raises:
      ValueError: When called: the loss cannot be captured. The text says why.
    """

    def __init__(self, gradient: LossGradient):
        self._gradient = gradient
        self._by_sizes: dict[Any, _Graphs] = {}

    def __call__(
        self, batch: Any, context: LossContext
    ) -> tuple[LossOutput, Sequence[torch.Tensor | None], torch.Tensor]:
        sizes = tuple([leaf.shape for leaf in tree.flatten(batch) if isinstance(leaf, torch.Tensor)])
        if (graphs := self._by_sizes.get(sizes)) is None:
            if len(self._by_sizes) == _MOST_SIZES:
                return self._gradient(batch, context)
            changing = nn.ModuleList([self._gradient.networks, context.targets])
            compiler = functools.partial(_captured, changing)
            graphs = self._by_sizes[sizes] = _Graphs(self._gradient, compiler=compiler)
        return graphs(batch, context)


class _Graphs(CompiledGradient):
    """Graphs for batches of equal sizes."""

    def _prepare(self) -> None:
        """A capture needs no compiler."""


def _captured(changing: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient `function` of nests of tensors, captured at its first call and replayed at every call.

    Args:
      changing: what `function` may change.
      function: the gradient.
    """
    inputs: list[Any] = []
    outputs: Any = None
    replay: Callable[[], None]

    def run(arguments: Any) -> Any:
        output, gradients, norm = function(*arguments)
        leaves = tree.flatten((output, norm))
        # Nearly all are numbers of one dtype, which are copied together.
        packed = torch.stack([leaf for leaf in leaves if _is_like(leaf, norm)])
        return (output, norm), packed, gradients

    def replayed(*arguments: Any) -> Any:
        nonlocal inputs, outputs, replay
        leaves = tree.flatten(arguments)
        if outputs is None:
            device = next(changing.parameters()).device
            inputs = [leaf.to(device, copy=True) if _is_tensor(leaf) else leaf for leaf in leaves]
            own = tree.unflatten_as(arguments, inputs)
            with restored(changing):  # It runs before it is captured.
                outputs, replay = _record(functools.partial(run, own), device)
        else:
            _refill(inputs, leaves)
        replay()
        results, packed, gradients = outputs
        copies = iter(packed.clone().unbind())
        kept = [
            next(copies) if _is_like(leaf, results[1]) else leaf.clone() if _is_tensor(leaf) else leaf
            for leaf in tree.flatten(results)
        ]
        output, norm = tree.unflatten_as(results, kept)
        return output, gradients, norm

    return replayed


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _is_like(leaf: Any, norm: torch.Tensor) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return False
    return leaf.dim() == 0 and leaf.dtype == norm.dtype and leaf.device == norm.device


def _refill(inputs: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Copies the tensors of `leaves` into the tensors of `inputs`, without waiting for a GPU."""
    pairs = [(own, leaf) for own, leaf in zip(inputs, leaves, strict=True) if _is_tensor(leaf)]
    near = [(own, leaf) for own, leaf in pairs if own.device == leaf.device]
    if near:
        torch._foreach_copy_([own for own, _ in near], [leaf for _, leaf in near])
    for own, leaf in pairs:
        if own.device != leaf.device:  # The counts, which are on the CPU.
            own.copy_(leaf, non_blocking=True)


def _record(run: Callable[[], Any], device: torch.device) -> tuple[Any, Callable[[], None]]:
    """Runs `run` a few times, then captures it. Returns its outputs, and a function that computes them.

    Raises:
      ValueError: `run` waits for the GPU, or copies from the CPU.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        # Libraries set themselves up for a stream, which they cannot do in a capture.
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_STEPS):
                run()
        current.wait_stream(stream)
        try:
            # By default, a thread that fetches batches meanwhile could neither allocate nor wait.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                outputs = run()
        except RuntimeError as error:
            cause = error.__context__ or error  # The end of a capture that has failed is an error, too.
            raise ValueError(
                f"step_mode: got 'cuda_graph' for a loss that cannot be captured: {cause} Write the loss "
                "without values that are read or come from the CPU; or use step_mode 'eager'."
            ) from error
    return outputs, graph.replay
