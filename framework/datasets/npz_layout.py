"""Episodes in `.npz` shards with a manifest, which are mapped into memory, not read.

```text
FOLDER/manifest.json         format, spec, shards, and what the writer says of the data
FOLDER/episodes-00000.npz    rows of some episodes, one after the other, in an array for each leaf
```

A shard has `lengths`, int64: the transitions T of each episode. `action`, `reward` and `discount` have T rows
of each episode, observations T + 1. Leaves are named by their path, as in `observation/camera`. Of an
observation that is a stack of k frames (`specs.StackedArray`), each frame is stored once: T + k of an
episode. Arrays are mapped unless they are compressed: these are read whole when the folder is opened.
"""

from __future__ import annotations

import bisect
import json
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tree

from framework import nest, specs
from framework.config_checks import RaisedAs
from framework.datasets.episodes import FIELDS, EpisodeDataset, step_of
from framework.runs import recorded_specs
from framework.types import Nest, Step

INDEX = "manifest.json"
_FORMAT = 1
_SHARD = 64 << 20  # Bytes of a shard, after which another one begins.


def index_of(path: Path) -> Path | None:
    """The manifest of the folder `path`; None without one."""
    return path / INDEX if (path / INDEX).is_file() else None


def write(
    path: Path,
    episodes: Iterable[Step],
    spec: specs.EnvironmentSpec,
    about: dict[str, Any],
    compress: bool = False,
) -> None:
    """Writes the shards and the manifest into the empty folder `path`; see `write_episodes`."""
    save = np.savez_compressed if compress else np.savez
    shards: list[dict[str, Any]] = []
    parts: list[dict[str, Nest]] = []
    lengths: list[int] = []
    stacks, size = _stacks(spec), 0

    def close() -> None:
        rows = tree.map_structure(lambda *leaves: np.concatenate(leaves), *parts)
        leaves, structure = nest.flatten(rows)
        arrays = dict(zip(nest.paths(structure), leaves, strict=True))
        shards.append({"file": f"episodes-{len(shards):05}.npz", "episodes": len(parts)})
        save(path / shards[-1]["file"], lengths=np.array(lengths, np.int64), **arrays)
        parts.clear()
        lengths.clear()

    for episode in episodes:
        parts.append(_stored(episode, stacks))
        lengths.append(len(episode.start_of_episode) - 1)
        size += sum(leaf.nbytes for leaf in tree.flatten(parts[-1]))
        if size >= _SHARD:
            close()
            size = 0
    if parts:
        close()
    content = {"format": _FORMAT, "spec": recorded_specs.whole(spec), "shards": shards, "about": about}
    (path / INDEX).write_text(json.dumps(content, indent=1))


def read(index: Path) -> EpisodeDataset:
    """Opens the folder of a manifest; see `read_episodes`."""
    try:
        content = json.loads(index.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"{index}: format: got {content['format']!r}, expected {_FORMAT}.")
        with RaisedAs(ValueError, ValueError, f"{index}: "):
            spec = recorded_specs.spec_of(content["spec"])
        files = [(str(shard["file"]), int(shard["episodes"])) for shard in content["shards"]]
        about = dict(content["about"])
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{index}: got a file without a valid {error}, expected a manifest of write_episodes."
        ) from error
    shards = [_Shard(index.parent / name, spec, count) for name, count in files]
    ends = np.cumsum([count for _, count in files]).tolist()

    def episode(number: int) -> Step:
        which = bisect.bisect_right(ends, number)
        return shards[which].episode(number - (ends[which - 1] if which else 0))

    lengths = [length for shard in shards for length in shard.lengths]
    return EpisodeDataset(str(index.parent), episode, lengths, spec, about)


class _Shard:
    """The arrays of one file, in memory that the kernel reads from the file when it is used."""

    def __init__(self, path: Path, spec: specs.EnvironmentSpec, count: int):
        self._stacks = _stacks(spec)
        template = dict(zip(FIELDS, spec, strict=True))
        leaves, structure = nest.flatten(template)  # By sorted names.
        arrays = _mapped(path)
        names = [*nest.paths(structure), "lengths"]
        if sorted(names) != sorted(arrays):
            raise ValueError(f"{path}: got the arrays {sorted(arrays)}, expected {sorted(names)}.")
        self.lengths: list[int] = arrays["lengths"].tolist()
        total = sum(self.lengths)
        for name, leaf in zip(names, leaves, strict=False):
            more = self._stacks.get(name, 1) if name.startswith(FIELDS[0]) else 0
            shape = leaf.shape[1:] if name in self._stacks else leaf.shape
            expected = f"{np.dtype(leaf.dtype)}{[total + more * count, *shape]}"
            got = f"{arrays[name].dtype}{[*arrays[name].shape]}"
            if got != expected or len(self.lengths) != count:
                raise ValueError(f"{path}: {name}: got {got}, expected {expected} of {count} episodes.")
        self._names, self._arrays, self._pack = names[:-1], arrays, nest.packer(structure)
        self._begins = np.cumsum([0, *self.lengths])

    def episode(self, index: int) -> Step:
        begin, length = int(self._begins[index]), self.lengths[index]
        leaves = []
        for name in self._names:
            more = self._stacks.get(name, 1) if name.startswith(FIELDS[0]) else 0
            rows = self._arrays[name][begin + more * index :][: length + more]
            if name in self._stacks:
                windows = np.lib.stride_tricks.sliding_window_view(rows, more, axis=0)
                rows = np.moveaxis(windows, -1, 1)
            leaves.append(rows)
        fields = self._pack(leaves)
        return step_of(*[fields[name] for name in FIELDS])


def _stacks(spec: specs.EnvironmentSpec) -> dict[str, int]:
    """The number of frames of each leaf that is a stack, by its name."""
    found = {}
    for path, leaf in specs.leaves(spec.observations):
        if (frames := specs.frame_stack(leaf)) is not None:
            found[specs.path_name(FIELDS[0], path)] = frames
    return found


def _stored(episode: Step, stacks: dict[str, int]) -> dict[str, Nest]:
    """The fields without the closing row, and frames in place of stacks."""
    fields = {name: tree.map_structure(lambda leaf: leaf[:-1], getattr(episode, name)) for name in FIELDS[1:]}
    leaves, structure = nest.flatten({FIELDS[0]: episode.observation})
    names = nest.paths(structure)
    frames = [
        np.concatenate([leaf[0], leaf[1:, -1]]) if name in stacks else leaf
        for name, leaf in zip(names, map(np.asarray, leaves), strict=True)
    ]
    return {**nest.packer(structure)(frames), **fields}


def _mapped(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a `.npz` file, mapped read-only; read, where they are compressed."""
    found = {}
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as raw:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                with archive.open(info) as file:
                    if info.compress_type != zipfile.ZIP_STORED:
                        found[name] = np.lib.format.read_array(file, allow_pickle=False)
                        continue
                    version = np.lib.format.read_magic(file)
                    header = {(1, 0): np.lib.format.read_array_header_1_0}.get(
                        version, np.lib.format.read_array_header_2_0
                    )
                    shape, fortran, dtype = header(file)
                    if dtype.hasobject or fortran:
                        raise ValueError(f"{name}: got {dtype}, expected numbers in C order")
                    before = file.tell()
                raw.seek(info.header_offset + 26)
                begin = info.header_offset + 30 + sum(struct.unpack("<HH", raw.read(4))) + before
                if not np.prod(shape):
                    found[name] = np.zeros(shape, dtype)
                else:
                    found[name] = np.memmap(path, dtype, "r", begin, shape)
    except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, ValueError, struct.error) as error:
        raise ValueError(
            f"{path}: got a file that cannot be read ({error}), expected a shard of write_episodes. It may "
            "be incomplete: write or copy it again."
        ) from error
    return found
