"""One checkpoint: a folder that is written atomically, with a manifest, and verified when it is read.

A checkpoint is written as a temporary folder with a manifest, synced and renamed. `manifest.json` lists every
file with its size and CRC-32. The first line of `DONE` is the SHA-256 of the manifest. A folder without both
is not a checkpoint. A part may itself be a checkpoint, written by another process. Then the manifest lists
the manifest and `DONE` of the part, and the part is verified too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from framework.checkpoints.state import load_state

FORMAT = 2
MANIFEST, DONE = "manifest.json", "DONE"
_BLOCK = 1 << 20  # Bytes read at a time.
_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
# By entry of a manifest, what it has to be.
_ENTRIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step": (lambda value: value is None or type(value) is int, "a whole number or null"),
    "parts": (
        lambda value: isinstance(value, list) and all(map(is_part_name, value)),
        "a list of names",
    ),
    "files": (
        lambda value: (
            isinstance(value, dict)
            and all(isinstance(each, list) and [*map(type, each)] == [int, int] for each in value.values())
        ),
        "a mapping of files to their sizes and checksums",
    ),
    "note": (lambda value: isinstance(value, dict), "a mapping"),
}
# The contents of a file, its blocks, or a function that writes a file or folder at a path.
Part = bytes | Iterable[Any] | Callable[[Path], object]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or is not intact. The message says which, why and what to do."""


@dataclass(frozen=True)
class CheckpointReader:
    """A checkpoint of which every file has been verified.

    Attributes:
      path: its folder.
      manifest: the contents of `manifest.json`, such as `step`, `versions`, `saved_at`, `files` and `note`.
    """

    path: Path
    manifest: Mapping[str, Any] = field(repr=False)

    @property
    def step(self) -> int:
        """The step at which it was saved; 0 if it was saved without a step."""
        return int(self.manifest["step"] or 0)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parts."""
        return tuple(self.manifest["parts"])

    def part(self, name: str) -> Path:
        """Returns the path of a part, which is a file or a folder."""
        if name not in self.manifest["parts"]:
            raise CheckpointError(
                f"Checkpoint {self.path} has no part {name!r}; it has {', '.join(self.names) or 'none'}."
            )
        return self.path / name

    def state(self, name: str, *entries: str) -> Any:
        """Loads a part that `torch_part` wrote, with `weights_only=True`, which runs no code.

        Args:
          name: name of the part.
          entries: keys of the dict in it, of the dict in this entry, and so on. The last one's value returns.

        Raises:
          CheckpointError: There is no such part, it cannot be loaded, or it lacks an entry.
        """
        path = self.part(name)
        try:
            state = load_state(path)
        except Exception as error:  # The content may be anything.
            why = str(error).strip().partition("\n")[0]
            wrong = f"its part {name!r} is no state that torch loads without running code ({why})"
            raise damaged(self.path, wrong) from error
        for entry in entries:
            if not isinstance(state, dict) or entry not in state:
                raise damaged(self.path, f"its part {name!r} has no entry {entry!r}")
            state = state[entry]
        return state


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
    """Compares every file of the checkpoint in the folder `path` with its manifest, and opens it.

    Raises:
      CheckpointError: A file is missing, truncated, altered, or of another format.
    """
    path = Path(path)
    manifest = read_manifest(path)
    for name, (size, checksum) in manifest["files"].items():
        file = _inside(path, name)
        if not file.is_file():
            raise damaged(path, f"{name} is missing")
        found = file.stat().st_size
        if found != size:
            kind = "truncated" if found < size else "longer than written"
            raise damaged(path, f"{name} is {kind}: it has {found} bytes, expected {size}")
        if _crc(file) != checksum:
            raise damaged(path, f"{name} has been altered: its checksum is not the manifest's")
    for name in manifest["parts"]:
        if f"{name}/{MANIFEST}" in manifest["files"]:
            open_checkpoint(path / name)
    return CheckpointReader(path, manifest)


def write_checkpoint(aside: Path, final: Path, parts: Mapping[str, Part], about: Mapping[str, Any]) -> None:
    """Writes the folder `final` atomically.

    Args:
      aside: temporary folder, on the same file system.
      final: path of the complete checkpoint.
      parts: contents by file or folder name. Blocks are buffers, such as arrays.
      about: JSON values for the manifest, in addition to the files.

    Raises:
      OSError: A file cannot be written; the error has its name.
    """
    files: dict[str, list[int]] = {}
    new = aside.with_name(f".new{aside.name}")
    new.mkdir(parents=True)  # Outside of the `try`: a folder of another process stays.
    try:
        with open(new / DONE, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(new, aside)  # Only now: another process removes a folder of that name without a lock.
            for name, part in parts.items():
                files.update(_write_part(aside, aside / name, part))
            manifest = {**about, "format": FORMAT, "parts": list(parts), "files": files}
            text = json.dumps(manifest, indent=1).encode()
            _write_file(aside / MANIFEST, [text])
            _write_file(aside / DONE, [hashlib.sha256(text).hexdigest().encode()])
            for folder in [path for path in aside.rglob("*") if path.is_dir()] + [aside]:
                sync(folder)
            os.rename(aside, final)
        sync(final.parent)
    except BaseException:
        for path in (new, aside):
            shutil.rmtree(path, ignore_errors=True)
        raise


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint after comparing it with its digest; does not read other files."""
    try:
        text = (path / MANIFEST).read_bytes()
        digest = (path / DONE).read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {missing}.") from error
    except OSError as error:
        raise damaged(path, f"its manifest cannot be read ({error.strerror})") from error
    if hashlib.sha256(text).hexdigest() != digest:
        raise damaged(path, f"{MANIFEST} has been altered or truncated")
    try:
        manifest: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"{MANIFEST} is not JSON ({error})") from error
    if not isinstance(manifest, dict):
        raise damaged(path, f"{MANIFEST}: got {type(manifest).__name__}, expected a mapping")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"Checkpoint {path}: got format {manifest.get('format', 1)}, expected {FORMAT}. Use the version "
            "of Repertory that wrote it, or another directory."
        )
    manifest.setdefault("note", {})
    for name, (fits, expected) in _ENTRIES.items():
        if not fits(value := manifest.get(name)):
            got = "none" if name not in manifest else repr(value)[:200]
            raise damaged(path, f"{MANIFEST}: {name}: got {got}, expected {expected}")
    return manifest


def delete(path: Path) -> None:
    """Deletes the files in a checkpoint's manifest, and the folder if it is then empty.

    A process may be killed meanwhile: the next call deletes the rest.
    """
    manifest: dict[str, Any] = {"parts": (), "files": ()}
    if [each.name for each in path.iterdir()] != [DONE]:  # Which is deleted last.
        manifest = read_manifest(path)
    folders: set[Path] = set()
    for name in manifest["parts"]:
        if f"{name}/{MANIFEST}" in manifest["files"] and (path / name / MANIFEST).exists():
            delete(path / name)
    for name in manifest["files"]:
        file = _inside(path, name)
        file.unlink(missing_ok=True)
        folders.update(parent for parent in file.parents if path in parent.parents)
    for folder in sorted(folders, key=lambda each: len(each.parts), reverse=True):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    for name in (MANIFEST, DONE):
        (path / name).unlink(missing_ok=True)
    if not any(path.iterdir()):
        path.rmdir()


def is_part_name(name: Any) -> bool:
    """Whether a part may have this name: letters, digits, `.`, `_` and `-`."""
    return isinstance(name, str) and bool(_PART_NAME.match(name)) and name not in (MANIFEST, DONE)


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"Checkpoint {path} is damaged: {reason}. It was not loaded; take another one.")


def _write_part(root: Path, path: Path, part: Part) -> dict[str, list[int]]:
    """Writes one part; returns `[size, checksum]` of its files by name relative to `root`."""
    if not callable(part):
        blocks = [part] if isinstance(part, bytes | bytearray | memoryview) else part
        return {path.relative_to(root).as_posix(): _write_file(path, blocks)}
    try:
        part(path)
    except OSError as error:
        if error.filename or error.errno is None:  # No file is at fault, if there is no number.
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    if not path.exists():
        raise CheckpointError(f"The writer of part {path.name!r} made neither a file nor a folder at {path}.")
    if (path / MANIFEST).exists():  # A checkpoint, synced and with its own checksums.
        found = [path / MANIFEST, path / DONE]
    else:
        found = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
        for file in found:
            sync(file)
    return {file.relative_to(root).as_posix(): [file.stat().st_size, _crc(file)] for file in found}


def _write_file(path: Path, blocks: Iterable[Any]) -> list[int]:
    """Writes and syncs a file; returns `[size, checksum]`."""
    size = checksum = 0
    try:
        with open(path, "wb") as file:
            for block in blocks:
                file.write(block)
                checksum = zlib.crc32(block, checksum)
                size += memoryview(block).nbytes
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    return [size, checksum]


def _crc(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _inside(path: Path, name: str) -> Path:
    """Returns the path of a checkpoint's file; refuses names outside of the checkpoint's folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise damaged(path, f"{MANIFEST} names the file {name!r}, which is outside of it")
    return path / name
