"""Checks of what users write: components, which are torch modules, and environments.

```python
from framework.testing import check_component

check_component(lambda: MyEncoder(width=64), environment.observation_spec())
```
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import tree
from dm_env import specs as dm_specs
from torch import nn

from framework import specs
from framework.environments.checks import check_environment as check_environment
from framework.types import Nest

_BATCH, _TIME = 4, 5
_SHOWN = 500  # Characters of the inputs in an error.
_LARGE = 1e3  # What an input without bounds is at its most extreme.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4  # By how much equal outputs may differ.


class ComponentError(ValueError):
    """A component breaks its contract.

    Attributes:
      inputs: the inputs that show it, a nest of tensors; None if it could not be built.
    """

    def __init__(self, text: str, inputs: Nest = None):
        shown = (
            "" if inputs is None else f" Its inputs, whole in `inputs` of this error: {repr(inputs)[:_SHOWN]}"
        )
        super().__init__(text + shown)
        self.inputs = inputs


def check_component(
    make: Callable[[], nn.Module],
    inputs: Nest,
    *,
    time: bool = False,
    recurrent: bool = False,
    export: bool = True,
    seed: int = 0,
) -> None:
    """Builds a component, feeds it with random and with extreme inputs, and checks what it computes.

    Outputs are nests of tensors `[B, ...]`, or of objects with tensors as attributes, such as distributions.
    They must be finite, have the same shapes and dtypes for all inputs, and be the same in a second call. A
    row must not depend on the other rows of a batch. Gradients must be finite, and reach all parameters that
    require them. The component is called as it was made, in training mode if `make` leaves it there.

    Args:
      make: makes the component.
      inputs: a nest of specs of its argument, without leading axes, like `EnvironmentSpec.observations`.
      time: whether its argument has the axes `[B, T, ...]`.
      recurrent: whether it has, in place of a call, `initial_state(batch_size)`, `step(inputs, state)` to
        outputs and the next state, and `unroll(inputs, state, start_of_episode)` of inputs `[B, T, ...]` to
        outputs `[B, T, ...]`; see `networks.RecurrentEncoder`. Both must compute the same.
      export: whether it must compute the same compiled by `torch.compile`, exported by `torch.export`, and,
        if onnx, onnxscript and onnxruntime are installed, as a file of ONNX. This takes half a minute.
      seed: of parameters and random inputs.

    Raises:
      ComponentError: The component is wrong. The error has the inputs that show it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        component = make()
        if not isinstance(component, nn.Module):
            raise ComponentError(f"make: got {component!r}, expected a torch module. Return one.")
        _Checks(component, inputs, (_BATCH, _TIME) if time or recurrent else (_BATCH,), recurrent).all(export)


class _Checks:
    def __init__(self, component: Any, spec: Nest, leading: tuple[int, ...], recurrent: bool):
        self._component, self._spec, self._leading, self._recurrent = component, spec, leading, recurrent
        self._name = type(component).__name__
        self._form: dict[str, Any] | None = None

    def all(self, export: bool) -> None:
        random = self._draw("random")
        for kind in ("random", "zeros", "smallest", "largest"):
            self._same_alone(self._draw(kind), kind)
        if self._recurrent:
            self._unroll_equals_steps(random)
        self._gradients(random)
        if export:
            self._exported(random)

    def _draw(self, kind: str) -> Nest:
        """Inputs with the leading axes, all alike but for random ones."""

        def leaf(spec: dm_specs.Array) -> torch.Tensor:
            number, most = spec.dtype.kind == "f", 3.0 if kind == "random" else _LARGE
            low, high = (-most, most) if number else (0, 1) if spec.dtype.kind == "b" else _range(spec.dtype)
            if isinstance(spec, dm_specs.BoundedArray):
                low, high = np.maximum(low, spec.minimum), np.minimum(high, spec.maximum)
            shape = (*self._leading, *spec.shape)
            share = {"random": torch.rand(shape).numpy(), "smallest": 0.0, "largest": 1.0}.get(kind)
            values = np.clip(0.0, low, high) if share is None else low + share * (np.subtract(high, low))
            values = np.broadcast_to(values if number else np.rint(values), shape)
            return torch.from_numpy(values.astype(spec.dtype))

        return tree.map_structure(leaf, self._spec)

    def _outputs(self, inputs: Nest) -> dict[str, torch.Tensor]:
        """The outputs by their names, checked by themselves."""
        leading = tree.flatten(inputs)[0].shape[: len(self._leading)]
        try:
            made = self._run(inputs, leading)
        except Exception as error:
            raise ComponentError(
                f"{self._name}: got {error!r} from a call. Take such inputs.", inputs
            ) from error
        outputs = dict(_tensors("output", made))
        if not outputs:
            self._fail(f"got {made!r}, expected tensors. Return a nest of them", inputs)
        for name, tensor in outputs.items():
            if tuple(tensor.shape[: len(leading)]) != tuple(leading):
                self._fail(
                    f"got {name} of shape {tuple(tensor.shape)}, expected {tuple(leading)} first. Keep the "
                    "leading axes",
                    inputs,
                )
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                self._fail(f"got {name} that is not finite, expected numbers. Bound what overflows", inputs)
        form = {name: (tuple(each.shape[len(leading) :]), each.dtype) for name, each in outputs.items()}
        self._form = self._form or form
        if form != self._form:
            self._fail(f"got outputs of {form}, expected {self._form} as before. Return one form", inputs)
        return outputs

    def _run(self, inputs: Nest, leading: Any) -> Any:
        if not self._recurrent:
            return self._component(inputs)
        starts = torch.zeros(tuple(leading), dtype=torch.bool)
        return self._component.unroll(inputs, self._component.initial_state(leading[0]), starts)

    def _same_alone(self, inputs: Nest, kind: str) -> None:
        outputs = self._outputs(inputs)
        self._equal(outputs, self._outputs(inputs), f"{kind} inputs again. Take out what is random", inputs)
        for begin, end in ((0, 2), (2, _BATCH), (0, 1)):
            rows = slice(begin, end)
            alone = self._outputs(_part(inputs, rows))
            own = {name: each[rows] for name, each in outputs.items()}
            what = f"rows {begin} to {end - 1} of {kind} inputs alone. Take out what rows share"
            self._equal(own, alone, f"{what}, such as statistics of the batch", inputs)

    def _unroll_equals_steps(self, inputs: Nest) -> None:
        starts = torch.rand(self._leading) < 0.3
        state = initial = self._component.initial_state(self._leading[0])
        made = []
        for t in range(self._leading[1]):
            begins = starts[:, t]
            state = tree.map_structure(
                lambda old, new, begins=begins: torch.where(
                    begins.reshape(-1, *[1] * (old.dim() - 1)), new, old
                ),
                *(state, initial),
            )
            output, state = self._component.step(_part(inputs, (slice(None), t)), state)
            made.append(dict(_tensors("output", output)))
        steps = {name: torch.stack([each[name] for each in made], 1) for name in made[0]}
        unrolled = self._component.unroll(inputs, initial, starts)
        what = f"step after step, with episodes that begin at {starts.tolist()}. Restart the state there"
        self._equal(dict(_tensors("output", unrolled)), steps, what, inputs)

    def _gradients(self, inputs: Nest) -> None:
        self._component.zero_grad()
        outputs = [each for each in self._outputs(inputs).values() if each.requires_grad]
        if outputs:
            torch.stack([each.float().square().sum() for each in outputs]).sum().backward()
        for name, parameter in self._component.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                self._fail(f"got no gradient of {name}. Use it, or set requires_grad=False", inputs)
            elif not torch.isfinite(parameter.grad).all():
                self._fail(f"got a gradient of {name} that is not finite. Bound what overflows", inputs)

    def _exported(self, inputs: Nest) -> None:
        flat = _Flat(self._component, inputs, self._recurrent)
        names = [f"output {index}" for index in range(len(flat(*flat.example)))]

        def outputs(function: Callable[..., Any]) -> dict[str, torch.Tensor]:
            return dict(zip(names, map(torch.as_tensor, function(*flat.example)), strict=True))

        def export() -> Any:
            batch = torch.export.Dim("batch", min=2)
            shapes = (tuple({0: batch} for _ in flat.example),)
            return torch.export.export(flat, flat.example, dynamic_shapes=shapes, strict=False)

        def as_file(*leaves: torch.Tensor) -> Any:
            import onnxruntime

            made: Any = torch.onnx.export(export(), dynamo=True, verbose=False)
            session = onnxruntime.InferenceSession(made.model_proto.SerializeToString())
            given = [each.name for each in session.get_inputs()]
            return session.run(None, dict(zip(given, [each.numpy() for each in leaves], strict=True)))

        ways: dict[str, Callable[..., Any]] = {
            "torch.export": lambda *leaves: export().module()(*leaves),
            "torch.compile": lambda *leaves: flat.run(torch.compile(flat.function), leaves),
        }
        if all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime"))):
            ways["ONNX"] = as_file
        with torch.no_grad():
            expected = outputs(flat)
            for way, function in ways.items():
                try:
                    made = outputs(function)
                except Exception as error:
                    what = f"{self._name}: {way} failed: {error}. Use operations of tensors, and no branch on"
                    raise ComponentError(f"{what} their values.", inputs) from error
                self._equal(
                    made, expected, f"the component, by {way}. Use operations of tensors only", inputs
                )

    def _equal(self, one: dict[str, Any], other: dict[str, Any], what: str, inputs: Nest) -> None:
        for name, tensor in one.items():
            if not torch.allclose(tensor.float(), other[name].float(), _RELATIVE, _ABSOLUTE):
                by = (tensor.float() - other[name].float()).abs().max().item()
                self._fail(f"got {name} that differs by {by:.3g} from that of {what}", inputs)

    def _fail(self, text: str, inputs: Nest) -> None:
        raise ComponentError(f"{self._name}: {text}.", inputs)


class _Flat(nn.Module):
    """A component as a function of tensors to a tuple of tensors: its call, or one step with its state."""

    def __init__(self, component: Any, inputs: Nest, recurrent: bool):
        super().__init__()
        self._component = component
        given: tuple[Any, ...] = (inputs,)
        if recurrent:
            given = _part(inputs, (slice(None), 0)), component.initial_state(_BATCH)
        self.function: Callable[..., Any] = component.step if recurrent else component
        self._like, self.example = given, tuple(tree.flatten(given))

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.run(self.function, leaves)

    def run(self, function: Callable[..., Any], leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        made = function(*tree.unflatten_as(self._like, leaves))
        return tuple(tensor for _, tensor in _tensors("output", made))


def _part(nest: Nest, index: Any) -> Nest:
    return tree.map_structure(lambda leaf: leaf[index], nest)


def _range(dtype: np.dtype) -> tuple[int, int]:
    info = np.iinfo(dtype)
    return max(info.min, -(2**31)), min(info.max, 2**31 - 1)


def _tensors(name: str, output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for path, leaf in tree.flatten_with_path(output):
        where = specs.path_name(name, path)
        if isinstance(leaf, torch.Tensor):
            yield where, leaf
        elif hasattr(leaf, "__dict__"):
            for attribute, value in vars(leaf).items():
                yield from _tensors(f"{where}.{attribute}", value)
