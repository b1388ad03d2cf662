"""The one writer of checkpoints: a folder is written aside, synced, described by a manifest and renamed.

`manifest.json` lists every file with its size and CRC-32; the first line of `DONE` is the SHA-256 of the
manifest. A folder without both is not a checkpoint. A part may be a checkpoint itself, written by another
process: then the manifest lists its two files, and it is verified in turn.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

FORMAT = 2
MANIFEST, DONE = "manifest.json", "DONE"
_BLOCK = 1 << 20  # bytes read at a time
# What the usual reasons mean to a person, by errno.
REASONS = {
    errno.ENOSPC: "no space is left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would pass the size limit of this process or file system",
    errno.EACCES: "permission is denied",
    errno.EROFS: "the file system is read-only",
}

# The content of a file, its blocks, or a function that makes a file or folder at the path it is given.
Part = bytes | Iterable[Any] | Callable[[Path], object]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or cannot be trusted. The text says which, why and what to do."""


def write(aside: Path, final: Path, parts: Mapping[str, Part], about: Mapping[str, Any]) -> None:
    """Writes the folder `final`, all of it or nothing.

    Args:
      aside: where it is written first, on the same file system.
      final: where it ends up.
      parts: file or folder name to what it holds. Blocks are buffers, such as arrays.
      about: JSON values of the manifest, beside the files.

    Raises:
      OSError: with the name of the file that cannot be written.
    """
    files: dict[str, list[int]] = {}
    try:
        aside.mkdir(parents=True)
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
        shutil.rmtree(aside, ignore_errors=True)
        raise


def verify(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint in `path`, after every file has been compared with it.

    Raises:
      CheckpointError: something is missing, truncated, altered, or of another format.
    """
    manifest = read_manifest(path)
    for name, (size, checksum) in manifest["files"].items():
        file = _inside(path, name)
        if not file.is_file():
            raise damaged(path, f"{name} is missing")
        found = file.stat().st_size
        if found != size:
            kind = "truncated" if found < size else "longer than written"
            raise damaged(path, f"{name} is {kind}: it has {found} bytes, expected {size}")
        if _crc(_blocks(file)) != checksum:
            raise damaged(path, f"{name} has been altered: its checksum is not that of the manifest")
    for name in manifest["parts"]:
        if f"{name}/{MANIFEST}" in manifest["files"]:
            verify(path / name)
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, compared with its own digest; its files are not looked at."""
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
    manifest: dict[str, Any] = json.loads(text)
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"Checkpoint {path} has format {manifest['format']}; this version of Repertory reads format "
            f"{FORMAT}. Use the version that wrote it (manifest.json names it)."
        )
    return manifest


def delete(path: Path) -> None:
    """Deletes what a checkpoint's manifest lists; the folder goes too if nothing else is in it."""
    manifest = read_manifest(path)
    folders = {path}
    for name in manifest["parts"]:
        if f"{name}/{MANIFEST}" in manifest["files"]:
            delete(path / name)
    for name in (*manifest["files"], MANIFEST, DONE):
        file = _inside(path, name)
        file.unlink(missing_ok=True)
        folders.update(parent for parent in file.parents if path in parent.parents)
    for folder in sorted(folders, key=lambda each: len(each.parts), reverse=True):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explain(error: OSError) -> str:
    """Which file could not be written, and why."""
    reason = REASONS.get(error.errno or 0, error.strerror or str(error))
    return f"{error.filename}: {reason}" if error.filename else reason


def damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"Checkpoint {path} is damaged: {reason}. It was not loaded.")


def _write_part(root: Path, path: Path, part: Part) -> dict[str, list[int]]:
    """Writes one part; its files, by their names relative to `root`, with size and checksum."""
    if not callable(part):
        blocks = [part] if isinstance(part, bytes | bytearray | memoryview) else part
        return {path.relative_to(root).as_posix(): _write_file(path, blocks)}
    try:
        part(path)
    except OSError as error:
        if error.filename:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    if not path.exists():
        raise CheckpointError(f"The writer of part {path.name!r} made neither a file nor a folder at {path}.")
    if (path / MANIFEST).exists():  # a checkpoint itself, synced and with checksums of its own
        found = [path / MANIFEST, path / DONE]
    else:
        found = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
        for file in found:
            sync(file)
    return {file.relative_to(root).as_posix(): [file.stat().st_size, _crc(_blocks(file))] for file in found}


def _write_file(path: Path, blocks: Iterable[Any]) -> list[int]:
    """Writes and syncs a file; `[size, checksum]`."""
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


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _crc(blocks: Iterable[bytes]) -> int:
    checksum = 0
    for block in blocks:
        checksum = zlib.crc32(block, checksum)
    return checksum


def _inside(path: Path, name: str) -> Path:
    """The file of a checkpoint; a manifest that points out of its own folder is refused."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise damaged(path, f"{MANIFEST} names the file {name!r}, which is outside of it")
    return path / name
