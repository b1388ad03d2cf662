"""What networks take an observation for: pictures, codes or numbers. This is the one place that decides.

| observation of one env | it is | networks see |
|---|---|---|
| `action_mask` | a mask | nothing; it is for the heads |
| integers of a `DiscreteArray`, and stacks of integers from 0 on | codes | one-hot vectors |
| `[H, W, C]`, `[C, H, W]` of at least 3 x 3, stacks of these, four axes of bytes | a picture | convolutions |
| anything else | numbers | a flat vector |

Integers with the bounds 0 and 255, and uint8 without bounds, are *bytes*, in a picture or not: networks
divide them by 255. Other integers, such as cells of 0 to 10, and floats are taken as they are. The config
field `inputs` says otherwise: `("observation/ram=numbers",)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tree

from framework import specs
from framework.types import Nest

PICTURE, CODES, NUMBERS, MASK = "picture", "codes", "numbers", "mask"
# The kinds that `inputs` can name: whether it is a picture, and whether it is divided by 255.
KINDS = {"pixels": (True, True), "planes": (True, False), "bytes": (False, True), "numbers": (False, False)}

_LEAST_PIXELS = 3  # height and width of the smallest picture: a convolution has that size
_BOARD = 36  # Pictures with fewer pixels on each side may have more channels than pixels.
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class Input(NamedTuple):
    """How networks take one leaf of an observation.

    Attributes:
      kind: PICTURE, CODES, NUMBERS or MASK.
      divides: whether integers are divided by 255.
      codes: the number of values of each code; 0 for other kinds.
    """

    kind: str
    divides: bool = False
    codes: int = 0


class _Declared(specs.Array):
    """A leaf whose kind the user has given."""

    __slots__ = ("kind",)

    def __init__(self, shape: Any, dtype: Any, name: str | None, kind: str):
        super().__init__(shape, dtype, name)
        self.kind = kind

    def __reduce__(self) -> Any:
        return type(self), (self.shape, self.dtype, self.name, self.kind)


def declared(observation_spec: Nest, inputs: Sequence[str]) -> Nest:
    """The spec with the kinds that `inputs` names for some of its leaves.

    Args:
      observation_spec: nest of dm_env specs of one env.
      inputs: `NAME=KIND`, such as `"observation/camera=pixels"`. A nest's name stands for all its leaves.
        `KINDS` has the kinds.

    Raises:
      ValueError: There is no leaf of such a name, or no such kind, or the leaf cannot be of that kind.
    """
    if not inputs:
        return observation_spec
    leaves = specs.leaves(observation_spec)
    names, found = [specs.path_name("observation", path) for path, _ in leaves], [leaf for _, leaf in leaves]
    for text in inputs:
        name, _, kind = text.partition("=")
        indices = [i for i, each in enumerate(names) if each == name or each.startswith(f"{name}/")]
        if not indices or kind not in KINDS:
            raise ValueError(
                f"inputs: got {text!r}, expected NAME=KIND with a name of {', '.join(names)} and a kind of "
                f"{', '.join(KINDS)}."
            )
        for i in indices:
            leaf = found[i]
            if KINDS[kind][0] and len(leaf.shape) not in (2, 3, 4):
                raise ValueError(
                    f"inputs: got {text!r} for {names[i]} of shape {leaf.shape}, expected bytes or numbers: "
                    "a picture has two to four axes."
                )
            found[i] = _Declared(leaf.shape, leaf.dtype, leaf.name, kind)
    return found[0] if not tree.is_nested(observation_spec) else tree.unflatten_as(observation_spec, found)


def inputs_of(observation_spec: Nest) -> list[Input]:
    """How networks take each leaf, in the order of `tree.flatten`."""
    return [
        Input(MASK) if specs.ACTION_MASK in path else _input(leaf)
        for path, leaf in specs.leaves(observation_spec)
    ]


def _input(leaf: specs.Array) -> Input:
    if isinstance(leaf, _Declared):
        is_picture, divides = KINDS[leaf.kind]
        return Input(PICTURE if is_picture else NUMBERS, divides)
    if codes := specs.num_codes(leaf):
        return Input(CODES, codes=codes)
    shape, divides = leaf.shape, specs.is_bytes(leaf)
    stacked = isinstance(leaf, specs.StackedArray | specs.StackedBoundedArray)
    is_picture = len(shape) == 3 or (len(shape) == 4 and (stacked or divides))
    if is_picture:
        _, height, width, _ = picture_axes(shape)
        is_picture = min(height, width) >= _LEAST_PIXELS
    return Input(PICTURE if is_picture else NUMBERS, divides)


def picture_axes(shape: Sequence[int]) -> tuple[int, int, int, bool]:
    """Channels of one frame, height, width, and whether the channels are the last axis.

    Two sides of one length are height and width. Otherwise the channels are the fewer, at the front or at the
    end; on a board, which may have many planes, they are what leaves height and width most alike.

    Args:
      shape: two axes of a picture of one channel, three of others, four of a stack of pictures.
    """
    if len(shape) == 2:
        return 1, shape[0], shape[1], False
    a, b, c = shape[-3:]
    last, first = min(a, b) / max(a, b, 1), min(b, c) / max(b, c, 1)  # How much alike the others are.
    if last == first or (max(last, first) < 1.0 and max(a, b, c) >= _BOARD):
        is_last = int(np.argmin((a, b, c))) == 2
    else:
        is_last = last > first
    return (c, a, b, True) if is_last else (a, b, c, False)


def describe(observation_spec: Nest, inputs: Sequence[str] = ()) -> list[str]:
    """One line for each leaf: its name, shape and dtype, and what networks take it for."""
    observation_spec = declared(observation_spec, inputs)
    leaves = specs.leaves(observation_spec)
    return [
        f"{specs.path_name('observation', path)} {tuple(leaf.shape)} {leaf.dtype}: {_words(leaf, each)}"
        for (path, leaf), each in zip(leaves, inputs_of(observation_spec), strict=True)
    ]


def _words(leaf: specs.Array, taken: Input) -> str:
    size = int(np.prod(leaf.shape, dtype=np.int64))
    if taken.kind == MASK:
        return "the mask of the actions"
    if taken.kind == CODES:
        return f"{_count(size, 'code')} of {taken.codes} values -> one-hot"
    if taken.kind == PICTURE:
        channels, height, width, _ = picture_axes(leaf.shape)
        color = {1: "gray", 3: "RGB"}.get(channels) if taken.divides else None
        color = color or f"{channels}-channel"
        frames = leaf.shape[0] if len(leaf.shape) == 4 else 1
        what = f"{_count(frames, f'{color} frame')} of {height} x {width} -> convolution"
    else:
        what = f"{_count(size, 'number')} -> flat"
    return what + (", / 255" if taken.divides else ", as they are")


def _count(n: int, noun: str) -> str:
    return f"{_WORDS[n] if n < len(_WORDS) else n} {noun}{'' if n == 1 else 's'}"
