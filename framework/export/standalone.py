"""Acts with an exported policy. This file needs Python 3.10, numpy and onnxruntime (or torch), nothing else.

```python
from policy import load

policy = load("policy.onnx")
action = policy(observation)                            # [B, ...] to [B, ...]
action, state = policy(observation, state)              # with a memory; None begins episodes
```
"""

import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Nest: TypeAlias = Any
Run: TypeAlias = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]


class _Leaf(NamedTuple):
    """An array of the observation: its place in it, the shape of one row, and the dtype."""

    path: tuple[Any, ...]
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


class ExportedPolicy:
    """An exported policy, from observations to actions.

    Args:
      metadata: what the file says about it.
      run: from the arrays of all inputs to the arrays of all outputs.
      seed: of the noise.

    Attributes:
      metadata: agent, environment, step, commit, return, specs, inputs and outputs.
      random: the generator of noise that is not given.
    """

    def __init__(self, metadata: dict[str, Any], run: Run, seed: int | None = None):
        self.metadata, self._run = metadata, run
        self.random = np.random.default_rng(seed)
        self._leaves = [
            _Leaf(
                path,
                "/".join(map(str, ("observation", *path))),
                tuple(spec["shape"]),
                np.dtype(spec["dtype"]),
            )
            for path, spec in _leaves(metadata["observations"])
        ]
        self._states = [np.asarray(each["initial"], each["dtype"])[None] for each in metadata["state"]]
        self._noise = int(metadata["noise"])
        self._single = "kind" in metadata["actions"] and not self._states

    def __call__(self, observation: Nest, state: Nest = None, noise: Any = None) -> Any:
        """The actions `[B, ...]`; with a memory, `(actions, next state)`. Arguments as in `step`."""
        if self._single:  # The shortest way: microseconds count.
            return self._run(self._inputs(observation, state, noise))[0]
        actions, state = self.step(observation, state, noise)
        return (actions, state) if self._states else actions

    def step(self, observation: Nest, state: Nest = None, noise: Any = None) -> tuple[Nest, list[np.ndarray]]:
        """The actions and the next state.

        Args:
          observation: nest of `[B, ...]`, as the metadata's `observations` says.
          state: what the last call returned; None where all episodes begin. Where one begins, copy that row
            of `initial_state(B)` into it.
          noise: float32 `[B, K]` between 0 and 1 for a policy that samples; None draws it.

        Raises:
          ValueError: An argument does not fit. The text says what came and what was expected.
        """
        outputs = self._run(self._inputs(observation, state, noise))
        count = len(outputs) - len(self._states)
        return _pack(self.metadata["actions"], iter(outputs[:count])), list(outputs[count:])

    def initial_state(self, batch_size: int) -> list[np.ndarray]:
        """The state of `batch_size` rows at the start of an episode; empty without a memory."""
        return [np.repeat(each, batch_size, 0) for each in self._states]

    def _inputs(self, observation: Nest, state: Nest, noise: Any) -> list[np.ndarray]:
        arrays: list[np.ndarray] = []
        rows = 0
        for path, name, shape, dtype in self._leaves:
            value = observation
            for key in path:
                try:
                    value = value[key]
                except (KeyError, IndexError, TypeError):
                    raise ValueError(f"observation: got {value!r:.200}, expected an entry {name}.") from None
            array = np.asarray(value)
            if array.dtype != dtype:
                if not np.can_cast(array.dtype, dtype, "same_kind"):
                    raise ValueError(f"{name}: got dtype {array.dtype}, expected {dtype}.")
                array = array.astype(dtype)
            if array.shape[1:] != shape or array.ndim == 0 or (arrays and len(array) != rows):
                expected = ", ".join(map(str, (rows if arrays else "B", *shape)))
                raise ValueError(
                    f"{name}: got shape {array.shape}, expected ({expected}), a row for each env."
                )
            rows = len(array)
            arrays.append(array)
        if self._states:
            given = self.initial_state(rows) if state is None else [np.asarray(each) for each in state]
            shapes = [(rows, *each.shape[1:]) for each in self._states]
            if [each.shape for each in given] != shapes:
                raise ValueError(f"state: got shapes {[x.shape for x in given]}, expected {shapes}.")
            pairs = zip(given, self._states, strict=True)
            arrays += [each.astype(of.dtype, copy=False) for each, of in pairs]
        elif state:
            raise ValueError(f"state: got {state!r:.80}, expected None: this policy has no memory.")
        if self._noise:
            noise = (
                self.random.random((rows, self._noise), np.float32) if noise is None else np.asarray(noise)
            )
            if noise.shape != (rows, self._noise) or not ((noise >= 0) & (noise <= 1)).all():
                raise ValueError(
                    f"noise: got shape {noise.shape}, expected {(rows, self._noise)}, numbers from 0 to 1."
                )
            arrays.append(noise.astype(np.float32, copy=False))
        elif noise is not None:
            raise ValueError("noise: got some, expected None: this policy was exported as a greedy one.")
        return arrays


def load(path: Any, seed: int | None = None, threads: int = 1) -> ExportedPolicy:
    """The policy in a file of `repertory export`, of either format.

    Args:
      path: the file.
      seed: of the noise of a policy that samples.
      threads: threads of onnxruntime. Small networks are fastest with one.

    Raises:
      ValueError: The file holds no policy of `repertory export`.
      ImportError: onnxruntime, or torch, is not installed.
    """
    file = pathlib.Path(path)
    with file.open("rb") as opened:
        is_torch = opened.read(2) == b"PK"  # A zip archive.
    text, run = _torch(str(file)) if is_torch else _onnx(str(file), threads)
    if not text:
        raise ValueError(f"{path}: got a file without metadata, expected one that repertory export wrote.")
    return ExportedPolicy(json.loads(text), run, seed)


def _onnx(path: str, threads: int) -> tuple[str, Run]:
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(f"{path} needs onnxruntime: pip install onnxruntime") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ValueError(f"{path}: got a file that onnxruntime cannot read: {error}") from error
    names, run = [each.name for each in session.get_inputs()], session.run
    text = session.get_modelmeta().custom_metadata_map.get("repertory", "")
    if len(names) == 1:
        (name,) = names
        return text, lambda arrays: run(None, {name: arrays[0]})
    return text, lambda arrays: run(None, dict(zip(names, arrays, strict=True)))


def _torch(path: str) -> tuple[str, Run]:
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"{path} needs torch: pip install torch") from error
    extra = {"repertory.json": ""}
    try:
        module = torch.export.load(path, extra_files=extra).module(check_guards=False)
    except Exception as error:
        raise ValueError(f"{path}: got a file that torch.export cannot read: {error}") from error

    def run(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        with torch.no_grad():
            tensors = [torch.from_numpy(a if a.flags.writeable else a.copy()) for a in arrays]
            return [tensor.numpy() for tensor in module(*tensors)]

    return extra["repertory.json"], run


def _leaves(spec: Nest, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The place and the spec of each array, in the order of the inputs: dicts by sorted keys."""
    if isinstance(spec, dict) and isinstance(spec.get("kind"), str):
        yield path, spec
        return
    for key in sorted(spec) if isinstance(spec, dict) else range(len(spec)):
        yield from _leaves(spec[key], (*path, key))


def _pack(spec: Nest, arrays: Iterator[np.ndarray]) -> Nest:
    """The inverse of `_leaves`."""
    if isinstance(spec, dict) and isinstance(spec.get("kind"), str):
        return next(arrays)
    if isinstance(spec, dict):
        made = {key: _pack(spec[key], arrays) for key in sorted(spec)}
        return {key: made[key] for key in spec}
    return tuple(_pack(child, arrays) for child in spec)
