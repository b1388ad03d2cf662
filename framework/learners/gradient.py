"""The part of a learner step that is a function of tensors: a loss, its gradients and their norm.

It runs in one of three ways (`STEP_MODES`) with results that are equal up to rounding: as it is written,
compiled, or as a captured CUDA graph. What changes from step to step and is no tensor is found out before: a
*rehearsal* runs the loss on copies of the networks, and records which choices it makes by the step count and
which random numbers it draws. There is a compiled function for each combination of choices. The numbers are
drawn outside of it, from the same generator in the same order.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import tree
from torch import nn
from torch.torch_version import TorchVersion

from framework import nest as nests
from framework.learners.context import LossContext, LossFn, LossOutput, is_due
from framework.replay.types import ReplaySample, SampleInfo

STEP_MODES = ("eager", "compile", "cuda_graph")
# Steps of an optimizer from which compiling pays: a minute, for about a third of a millisecond per step.
PAYS_FROM_STEPS = 200_000
# One copy of all gradients is faster than one operation per gradient up to this number of elements.
_SMALL = 1 << 16
# Random numbers that a loss draws: the method that draws, shape, and dtype.
_Draw = tuple[str, tuple[int, ...], torch.dtype]
# Choices that a loss makes: `is_due` of period and offset.
_Choices = dict[tuple[int, int], bool]
_COMPILES_SINCE = "2.13"  # Older versions cannot compile a gradient, or not apart from other functions.


def why_not(step_mode: str, device: torch.device, devices: Mapping[str, Any] | None = None) -> str:
    """Why this machine cannot compute gradients in this mode, with `devices` of parts; empty if it can."""
    if step_mode != "eager" and devices:
        return f"with devices {dict(devices)}, expected 'eager'. Leave one of them out."
    if step_mode == "cuda_graph" and device.type != "cuda":
        return f"which needs a GPU, on {device}. Give a device such as 'cuda', or use 'eager'."
    if step_mode == "compile" and torch.__version__ < TorchVersion(_COMPILES_SINCE):
        return f"with torch {torch.__version__}. Install torch {_COMPILES_SINCE} or newer, or use 'eager'."
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if step_mode == "compile" and shutil.which(compiler) is None:
        return f"without a C++ compiler, {compiler}. Install one, name another in CXX, or use 'eager'."
    return ""


class LossGradient:
    """`(batch, context)` to the loss's output, the gradient of each parameter (or None), and their norm.

    Args:
      networks: the networks.
      parameters: the networks' parameters that need a gradient.
      loss_fn: see `SGDLearner`.
      precision: makes the context in which the loss is computed.
      device: device of the norm, if the parameters are on several; None: they are on one.

    Attributes:
      loss_fn, precision: as given.
    """

    def __init__(
        self,
        networks: nn.Module,
        parameters: Sequence[nn.Parameter],
        loss_fn: LossFn,
        precision: Callable[[], contextlib.AbstractContextManager[Any]],
        device: torch.device | None = None,
    ):
        self.networks, self.parameters, self.loss_fn = networks, list(parameters), loss_fn
        self.precision, self._device = precision, device
        self._small = sum(p.numel() for p in self.parameters) <= _SMALL
        self._checked = False

    def __call__(
        self, batch: Any, context: LossContext
    ) -> tuple[LossOutput, Sequence[torch.Tensor | None], torch.Tensor]:
        with self.precision():
            output = self.loss_fn(self.networks, batch, context)
        gradients: Sequence[torch.Tensor | None]
        if torch.compiler.is_compiling():
            gradients = torch.autograd.grad(output.loss, self.parameters, allow_unused=True)
        else:  # Several learners average gradients in `backward`.
            if not self._checked:
                _check(output)
                self._checked = True
            for parameter in self.parameters:
                parameter.grad = None  # optimizer.zero_grad also calls hooks for profilers.
            output.loss.backward()
            gradients = [parameter.grad for parameter in self.parameters]
        metrics = {name: value.detach() for name, value in output.metrics.items()}
        priorities = None if output.priorities is None else output.priorities.detach()
        detached = LossOutput(output.loss.detach(), metrics, priorities)
        return detached, gradients, self.norm([gradient for gradient in gradients if gradient is not None])

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The norm of all gradients together, as nn.utils.get_total_norm, which is slower."""
        if not gradients:
            return torch.zeros(())
        if self._device is not None:
            return nn.utils.get_total_norm(gradients).to(self._device)
        if self._small:  # One copy costs less than one call per gradient.
            return torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def _check(output: Any) -> None:
    """Raises TypeError, which names the part, if a loss did not return what it should."""
    if not isinstance(output, LossOutput):
        raise TypeError(f"loss: returned {type(output).__name__}, expected LossOutput(loss, metrics).")
    for name, value in {"loss": output.loss, **output.metrics}.items():
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.40}"
            raise TypeError(f"loss: {name} in its LossOutput: got {got}, expected a scalar tensor.")


class _Rehearsed:
    """Answers a loss as its context would, and records what it asks."""

    def __init__(self, steps: int, generator: torch.Generator):
        self._steps, self._generator = steps, generator
        self.choices: _Choices = {}
        self.draws: list[_Draw] = []

    def draw(self, method: str, empty: torch.Tensor) -> torch.Tensor:
        self.draws.append((method, tuple(empty.shape), empty.dtype))
        drawn: torch.Tensor = getattr(empty, method)(generator=self._generator)
        return drawn

    def is_due(self, period: int, offset: int) -> bool:
        self.choices[period, offset] = answer = is_due(self._steps, period, offset)
        return answer


class _Prompted:
    """Answers a loss with what has been drawn and chosen before."""

    def __init__(self, drawn: Iterator[torch.Tensor], choices: _Choices):
        self._drawn, self._choices = drawn, choices

    def draw(self, method: str, empty: torch.Tensor) -> torch.Tensor:
        return next(self._drawn)

    def is_due(self, period: int, offset: int) -> bool:
        return self._choices[period, offset]


class CompiledGradient:
    """A `LossGradient` that is compiled as a whole when it is first called.

    Args:
      gradient: the gradient.
      fixed_sizes: whether all batches have the same sizes. If not, the first axis of a batch's leaves may
        change without compiling again; a leaf that does not begin where its memory does is compiled again.
      compiler: what compiles a function; `torch.compile`, if not given.

    Raises:
      ValueError: When called: the loss cannot be compiled. The text says where and why.
    """

    def __init__(
        self,
        gradient: LossGradient,
        fixed_sizes: bool = True,
        compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ):
        self._gradient, self._fixed_sizes = gradient, fixed_sizes
        self._compiler = compiler or functools.partial(
            # Workers of the compiler would outlive a learner that is killed.
            torch.compile,
            fullgraph=True,
            isolate_recompiles=True,
            options={"compile_threads": 1, "guard_filter_fn": _checks_of_sizes},
        )
        self._questions: list[tuple[int, int]] = []
        self._draws: dict[Any, list[_Draw]] = {}
        self._compiled: dict[tuple[bool, ...], Callable[..., Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Functions and graphs are this process's: they are compiled or captured again.
        return {**vars(self), "_compiled": {}}

    def __call__(
        self, batch: Any, context: LossContext
    ) -> tuple[LossOutput, Sequence[torch.Tensor | None], torch.Tensor]:
        generator, batch = context.generator, _as_tensors(batch, context.generator.device)
        rows = 0 if self._fixed_sizes else len(tree.flatten(batch)[0])
        steps = int(context.learner_steps)
        answers = tuple([is_due(steps, *question) for question in self._questions])
        if (draws := self._draws.get((answers, rows))) is None:
            answers, draws = self._rehearse(batch, context, rows)
        drawn = [
            getattr(torch.empty(shape, dtype=dtype, device=generator.device), method)(generator=generator)
            for method, shape, dtype in draws
        ]
        arguments = batch, context.learner_steps, context.env_steps, drawn
        result: tuple[LossOutput, Sequence[torch.Tensor | None], torch.Tensor]
        if (compiled := self._compiled.get(answers)) is not None:
            result = compiled(*arguments)
            return result
        compiled = self._compiled[answers] = self._compile(batch, context, answers)
        try:
            result = compiled(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise ValueError(
                f"step_mode: got 'compile' for a loss that cannot be compiled: {error} Write the loss with "
                "tensors, `context.is_due` and the context's random numbers; or use step_mode 'eager'."
            ) from error
        return result

    def _prepare(self) -> None:
        _prepare_compiler()

    def _rehearse(self, batch: Any, context: LossContext, rows: int) -> tuple[tuple[bool, ...], list[_Draw]]:
        """What the loss asks at this step: the answers to its questions, and its draws."""
        generator = torch.Generator(context.generator.device)
        generator.set_state(context.generator.get_state())
        asked = _Rehearsed(int(context.learner_steps), generator)
        # Copies, because a loss may change buffers of the networks.
        networks, targets = copy.deepcopy((self._gradient.networks, context.targets))
        context = context._replace(targets=targets, asked=asked, wants_metrics=True)
        with torch.no_grad(), self._gradient.precision():
            self._gradient.loss_fn(networks, batch, context)
        self._questions += [question for question in asked.choices if question not in self._questions]
        steps = int(context.learner_steps)
        answers = tuple([is_due(steps, *question) for question in self._questions])
        self._draws[answers, rows] = asked.draws
        return answers, asked.draws

    def _compile(self, batch: Any, context: LossContext, answers: tuple[bool, ...]) -> Callable[..., Any]:
        self._prepare()
        choices = dict(zip(self._questions, answers, strict=True))
        gradient, template = self._gradient, context._replace(wants_metrics=True)

        def function(
            batch: Any, learner_steps: torch.Tensor, env_steps: torch.Tensor, drawn: list[torch.Tensor]
        ) -> Any:
            asked = _Prompted(iter(drawn), choices)
            return gradient(
                batch, template._replace(learner_steps=learner_steps, env_steps=env_steps, asked=asked)
            )

        if not self._fixed_sizes:
            for leaf in tree.flatten(batch):
                torch._dynamo.maybe_mark_dynamic(leaf, 0)
        return self._compiler(function)


def _checks_of_sizes(entries: Sequence[Any]) -> list[bool]:
    """Which checks of the compiler stay at each call: the batch's sizes. Nothing else changes."""
    return [
        entry.guard_type == "SHAPE_ENV" or (entry.guard_type == "TENSOR_MATCH" and "batch" in entry.name)
        for entry in entries
    ]


def _as_tensors(batch: Any, device: torch.device) -> Any:
    """`batch` with the arrays of its info as tensors; keys as int64, as tensors have no shifts of uint64."""
    if not isinstance(batch, ReplaySample) or batch.info is None:
        return batch
    key, *others = batch.info
    info = [torch.as_tensor(each) for each in (np.asarray(key).view(np.int64), *others)]
    return batch._replace(info=SampleInfo(*[each.to(device, non_blocking=True) for each in info]))


@functools.cache
def _prepare_compiler() -> None:
    """Tells torch's compiler to trace gradients and dm-tree, and that numbers are settings, which stay."""
    config = torch._dynamo.config
    config.trace_autograd_ops = config.specialize_float = config.specialize_int = True
    for name, function in _NEST_FUNCTIONS.items():
        torch.compiler.substitute_in_graph(getattr(tree, name), skip_signature_check=True)(function)


def _flatten(nest: Any) -> list[Any]:
    return nests.flatten(nest)[0]


def _map_structure(function: Callable[..., Any], *nest: Any) -> Any:
    leaves = zip(*[_flatten(each) for each in nest], strict=True)
    return nests.unflattener(nest[0])([function(*each) for each in leaves])


# What the compiler reads in place of dm-tree's functions, which are in C++.
_NEST_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "is_nested": lambda nest: isinstance(nest, (dict, list, tuple)),
    "flatten": _flatten,
    "map_structure": _map_structure,
    "unflatten_as": lambda template, leaves: nests.unflattener(template)(leaves),
}
