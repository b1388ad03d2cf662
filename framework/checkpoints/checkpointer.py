"""Checkpoints of one directory: written atomically, numbered, verified when read, the newest ones kept.

A checkpoint is written as a temporary folder with a manifest, synced and renamed. `manifest.json` lists every
file with its size and CRC-32. The first line of `DONE` is the SHA-256 of the manifest. A folder without both
is not a checkpoint. A part may itself be a checkpoint, written by another process. Then the manifest lists
the manifest and `DONE` of the part, and the part is verified too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from framework.checkpoints.state import load_state

FORMAT = 2
MANIFEST, DONE = "manifest.json", "DONE"
_BLOCK = 1 << 20  # Bytes read at a time.
# Messages for the usual errors, by errno.
REASONS = {
    errno.ENOSPC: "no space is left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would pass the size limit of this process or file system",
    errno.EACCES: "permission is denied",
    errno.EROFS: "the file system is read-only",
}

_FULL = (errno.ENOSPC, errno.EDQUOT)

# The contents of a file, its blocks, or a function that writes a file or folder at a path.
Part = bytes | Iterable[Any] | Callable[[Path], object]

_NAME = re.compile(r"^checkpoint-(\d{6,})(?:-step-(\d+))?$")
_PART_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
_PACKAGES = (
    *("repertory", "torch", "numpy", "gymnasium", "dm-env", "dm-tree", "pyzmq", "ale-py", "dm-reverb"),
    *("mujoco", "box2d", "dm-control", "minatar", "minigrid", "pettingzoo", "envpool"),
)


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

    def state(self, name: str) -> Any:
        """Loads a part that `torch_part` wrote, with `weights_only=True`, which runs no code."""
        return load_state(self.part(name))


class Checkpointer:
    """Saves checkpoints in one directory and restores them.

    A save is atomic. If it fails, on a full disk for example, the error names the file and the newest intact
    checkpoint, and earlier checkpoints are unchanged.

    Args:
      directory: the directory; created when the first checkpoint is saved.
      keep: number of the newest checkpoints to keep. Only files that a manifest lists are deleted.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep: got {keep}, expected at least 1.")
        self.directory = Path(directory)
        self._keep = keep
        self._saving = threading.Lock()  # Each save takes the next number.

    def save(
        self, step: int | None, parts: Mapping[str, Part], note: Mapping[str, Any] | None = None
    ) -> Path:
        """Writes one checkpoint and deletes those beyond `keep`.

        Args:
          step: a step for the name, for users; several checkpoints may have the same. None leaves it out.
          parts: by name, bytes, blocks of bytes, or a function that writes a file or folder at a path.
          note: JSON values for the manifest.

        Returns:
          The folder of the checkpoint.

        Raises:
          CheckpointError: A file cannot be written. Earlier checkpoints are unchanged.
        """
        for name in parts:
            if not _PART_NAME.match(name) or name in (MANIFEST, DONE):
                raise ValueError(
                    f"part name: got {name!r}, expected letters, digits, '.', '_' and '-', starting with a "
                    f"letter or digit, and not {MANIFEST!r} or {DONE!r}."
                )
        with self._saving:
            existing = self.checkpoints()
            number = 1 + max((_number(path) for path in existing), default=0)
            at_step = "" if step is None else f"-step-{int(step)}"
            final = self.directory / f"checkpoint-{number:06d}{at_step}"
            aside = self.directory / f".writing-{final.name}-{secrets.token_hex(4)}"
            about = {
                "step": None if step is None else int(step),
                "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "versions": package_versions(),
                "note": dict(note or {}),
            }
            try:
                self._remove_unfinished()
                write_checkpoint(aside, final, parts, about)
            except OSError as error:
                if error.errno is None:
                    raise  # No file is at fault: a call was lost, say.
                safe = f"The newest intact one is {existing[-1]}" if existing else "There was none before it"
                elsewhere = ""
                if Path(os.fsdecode(error.filename or final)).is_relative_to(self.directory):
                    elsewhere = ", or give the run another folder with --directory"
                raise CheckpointError(
                    f"Checkpoint {final} was not saved: could not write {explain(error)}. Nothing "
                    f"saved before was touched. {safe}. {remedy(error)}{elsewhere}."
                ) from error
            for path in self.checkpoints()[: -self._keep]:
                try:
                    delete(path)
                except (OSError, CheckpointError) as error:  # The new one is saved, so this is no failure.
                    warnings.warn(f"Could not delete the old checkpoint {path}: {error}")
            return final

    def checkpoints(self) -> list[Path]:
        """Returns the folders of all checkpoints, oldest first, without verifying their files."""
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.iterdir() if _NAME.match(path.name)]
        ours = [path for path in found if (path / DONE).exists() or (path / MANIFEST).exists()]
        return sorted(ours, key=_number)

    def latest(self) -> Path | None:
        """Returns the folder of the newest checkpoint, or None."""
        found = self.checkpoints()
        return found[-1] if found else None

    def restore(self, which: str | int | os.PathLike[str] | None = None) -> CheckpointReader:
        """Verifies a checkpoint and opens it.

        Args:
          which: None or "latest", "previous" (the one before the newest), a step, or a folder.

        Raises:
          CheckpointError: There is no such checkpoint, or it is damaged. The message says how, and what to
            do.
        """
        found = self.checkpoints()
        path = self._find("latest" if which is None else which, found)
        try:
            return open_checkpoint(path)
        except CheckpointError as error:
            older = ""
            if found[1:] and path == found[-1]:
                older = f" The one before it is {found[-2].name}; ask for 'previous'."
            raise CheckpointError(f"{error}{older}") from error

    def newest_intact(self) -> CheckpointReader | None:
        """Returns the newest checkpoint that is not damaged, with a warning about newer ones; None if there
        is no checkpoint.

        Raises:
          CheckpointError: There are checkpoints, and all are damaged.
        """
        reasons = []
        for path in reversed(self.checkpoints()):
            try:
                reader = open_checkpoint(path)
            except CheckpointError as error:
                reasons.append(str(error))
                continue
            if reasons:
                warnings.warn(f"{' '.join(reasons)} Continuing from the older {path.name}.")
            return reader
        if reasons:
            raise CheckpointError(f"No checkpoint in {self.directory} is intact. {' '.join(reasons)}")
        return None

    def _find(self, which: str | int | os.PathLike[str], found: list[Path]) -> Path:
        if which in ("latest", "previous"):
            place = 1 if which == "latest" else 2
            matching = found[-place:] if len(found) >= place else []
        elif isinstance(which, int) or (isinstance(which, str) and which.isdigit()):
            matching = [path for path in found if path.name.endswith(f"-step-{int(which)}")][-1:]
        else:
            places = (Path(which), self.directory / which)
            matching = [path for path in places if (path / MANIFEST).exists()]
        if not matching:
            names = ", ".join(path.name for path in found) or "none"
            raise CheckpointError(
                f"There is no checkpoint {str(which)!r} in {self.directory}; it has {names}. Give 'latest', "
                "'previous', a step, or one of these."
            )
        return matching[0]

    def _remove_unfinished(self) -> None:
        """Removes unfinished checkpoints, whose lock the kernel released when their process was killed."""
        for path in self.directory.glob(".writing-checkpoint-*"):
            with contextlib.suppress(OSError), open(path / DONE, "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)


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


def package_versions() -> dict[str, str]:
    """Returns the versions of the packages that a run depends on, without importing them."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _number(path: Path) -> int:
    return int(path.name.split("-")[1])


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
    aside.mkdir(parents=True)  # Outside of the `try`: a folder of another process stays.
    try:
        with open(aside / DONE, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
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
    manifest: dict[str, Any] = json.loads(text)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"Checkpoint {path}: got format {manifest.get('format', 1)}, expected {FORMAT}. Use the version "
            "of Repertory that wrote it, or another directory."
        )
    return manifest


def delete(path: Path) -> None:
    """Deletes the files in a checkpoint's manifest, and the folder if it is then empty."""
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
    """Waits until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explain(error: OSError) -> str:
    """Returns a message with the file that could not be written, and the reason."""
    reason = REASONS.get(error.errno or 0, error.strerror or str(error))
    return f"{error.filename}: {reason}" if error.filename else reason


def remedy(error: OSError) -> str:
    """Returns what to do about a file that could not be written, as the beginning of a sentence."""
    return "Free some space there" if error.errno in _FULL else "Make that place writable"


def damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"Checkpoint {path} is damaged: {reason}. It was not loaded.")


def _write_part(root: Path, path: Path, part: Part) -> dict[str, list[int]]:
    """Writes one part; returns `[size, checksum]` of its files by name relative to `root`."""
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
