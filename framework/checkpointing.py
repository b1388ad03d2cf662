"""Checkpoints: folders that are either complete and proven so, or not there.

::

    checkpointer = Checkpointer("run/checkpoints", keep=3)
    checkpointer.save(step, {"learner": torch_part(learner.save()), "replay": client_writes_to_path})
    reader = checkpointer.restore()                       # the newest; checked in full before it is read
    learner.restore(reader.state("learner"))

A checkpoint is written beside its final place, forced to disk and then renamed; ``manifest.json`` holds the
size and SHA-256 of every file and the versions of the packages that wrote it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from framework.checkpoint_state import load_state, save_state
from framework.replay import disk

FORMAT = 1
MANIFEST = "manifest.json"
Part = bytes | Callable[[Path], object]

_NAME = re.compile(r"^checkpoint-(\d{6,})-step-(\d+)$")
_PART_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
_FULL = {errno.ENOSPC: "no space is left on the device", errno.EDQUOT: "the disk quota is used up",
         errno.EFBIG: "a file would pass the size limit of this process or file system"}  # fmt: skip


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or cannot be trusted; the text says which, why and what to do."""


@dataclass(frozen=True)
class CheckpointReader:
    """A checkpoint whose every file has been checked against its manifest.

    Attributes:
      path: its folder.
      step: the step it was saved at.
      manifest: all of ``manifest.json``: ``versions``, ``saved_at``, ``files`` and ``note`` among others.
    """

    path: Path
    step: int
    manifest: Mapping[str, Any] = field(repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parts."""
        return tuple(self.manifest["parts"])

    def part(self, name: str) -> Path:
        """Where the part lies: the file or folder that its writer was given."""
        if name not in self.manifest["parts"]:
            raise CheckpointError(
                f"Checkpoint {self.path} has no part {name!r}; it has {', '.join(self.names) or 'none'}."
            )
        return self.path / name

    def read(self, name: str) -> bytes:
        """The bytes of a part that is one file."""
        return self.part(name).read_bytes()

    def state(self, name: str) -> Any:
        """The state in a part that ``torch_part`` wrote. Loaded with ``weights_only=True``: runs no code."""
        return load_state(self.part(name))


class Checkpointer:
    """Saves checkpoints into one folder and finds them again.

    Several parts make a checkpoint, each a file or a folder. Saving is all or nothing: when it fails, on a
    full disk for instance, the error says so and the checkpoints saved before are as they were.

    Args:
      directory: the folder; made when the first checkpoint is saved.
      keep: how many of the newest checkpoints stay. Only files that a manifest lists are ever deleted.
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 3):
        if keep < 1:
            raise ValueError(f"Checkpointer: keep is {keep}; expected 1 or more.")
        self._directory = Path(directory)
        self._keep = keep

    @property
    def directory(self) -> Path:
        return self._directory

    def save(self, step: int, parts: Mapping[str, Part], note: Mapping[str, Any] | None = None) -> Path:
        """Writes one checkpoint and deletes those beyond ``keep``.

        Args:
          step: what orders checkpoints for people; any number of checkpoints may have the same.
          parts: name to bytes, or to a callable that is given a path and makes a file or a folder there.
          note: JSON values to keep in the manifest.

        Returns:
          The folder of the checkpoint.

        Raises:
          CheckpointError: the disk is full or cannot be written; nothing saved before is touched.
        """
        for name in parts:
            if not _PART_NAME.match(name) or name == MANIFEST:
                raise ValueError(
                    f"Checkpointer.save: part name {name!r}; expected letters, digits, '.', '_' and '-', "
                    f"beginning with a letter or digit, and not {MANIFEST!r}."
                )
        existing = self.checkpoints()
        serial = 1 + max((_serial(path) for path in existing), default=0)
        final = self._directory / f"checkpoint-{serial:06d}-step-{int(step)}"
        writing = self._directory / f".writing-{final.name}-{socket.gethostname()}-{os.getpid()}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._clean_up_after_the_dead()
            writing.mkdir()
            files: dict[str, dict[str, Any]] = {}
            for name, part in parts.items():
                _write_part(writing / name, part)
                files.update(_describe(writing, writing / name))
            manifest = {
                "format": FORMAT,
                "step": int(step),
                "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "versions": package_versions(),
                "parts": list(parts),
                "note": dict(note or {}),
                "files": files,
            }
            _write_file(writing / MANIFEST, json.dumps(manifest, indent=1).encode())
            for folder in [path for path in writing.rglob("*") if path.is_dir()] + [writing]:
                disk.sync(folder)
            os.rename(writing, final)
            disk.sync(self._directory)
        except OSError as error:
            shutil.rmtree(writing, ignore_errors=True)
            raise CheckpointError(self._explain(error, final, existing)) from error
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        self._prune()
        return final

    def checkpoints(self) -> list[Path]:
        """The folders of all checkpoints, oldest first; they are not checked."""
        if not self._directory.is_dir():
            return []
        found = [path for path in self._directory.iterdir() if _NAME.match(path.name)]
        return sorted((path for path in found if (path / MANIFEST).exists()), key=_serial)

    def latest(self) -> Path | None:
        """The folder of the newest checkpoint, or None."""
        found = self.checkpoints()
        return found[-1] if found else None

    def restore(
        self, which: str | int | os.PathLike | None = None, *, fall_back: bool = False
    ) -> CheckpointReader:
        """Checks a checkpoint in full and opens it.

        Args:
          which: None or "latest", "previous" (the one before the newest), a step, or a folder.
          fall_back: when the newest one is damaged, warn and take the newest one that is not.

        Raises:
          CheckpointError: there is none, or it is damaged; the text says in what way and what to do.
        """
        if which not in (None, "latest"):
            return open_checkpoint(self._find(which))
        found = self.checkpoints()
        if not found:
            raise CheckpointError(
                f"There is no checkpoint in {self._directory}: its run ended before the first one. Check the "
                "folder, or start a new run in another."
            )
        try:
            return open_checkpoint(found[-1])
        except CheckpointError as error:
            if not fall_back:
                older = f" The one before it is {found[-2].name}; ask for 'previous'." if found[1:] else ""
                raise CheckpointError(f"{error}{older}") from error
            reasons = [str(error)]
        for path in reversed(found[:-1]):
            try:
                reader = open_checkpoint(path)
            except CheckpointError as error:
                reasons.append(str(error))
                continue
            warnings.warn(f"{' '.join(reasons)} Going on from the older {path.name} instead.")
            return reader
        raise CheckpointError(f"No checkpoint in {self._directory} is intact. {' '.join(reasons)}")

    def _find(self, which: str | int | os.PathLike | None) -> Path:
        found = self.checkpoints()
        names = ", ".join(path.name for path in found) or "none"
        if which == "previous":
            if len(found) < 2:
                raise CheckpointError(
                    f"There is no previous checkpoint in {self._directory}; it has {names}."
                )
            return found[-2]
        if isinstance(which, int) or (isinstance(which, str) and which.isdigit()):
            at_step = [path for path in found if _step(path) == int(which)]
            if not at_step:
                raise CheckpointError(f"No checkpoint of step {which} in {self._directory}; it has {names}.")
            return at_step[-1]
        path = Path(os.fspath(which))  # type: ignore[arg-type]
        if (path / MANIFEST).exists():
            return path
        if (self._directory / path / MANIFEST).exists():
            return self._directory / path
        raise CheckpointError(
            f"{which!r} is no checkpoint; expected 'latest', 'previous', a step, or one of: {names}."
        )

    def _prune(self) -> None:
        for path in self.checkpoints()[: -self._keep]:
            try:
                delete_checkpoint(path)
            except (
                OSError,
                CheckpointError,
            ) as error:  # the new one is safe; an old one too many is no failure
                warnings.warn(f"Could not delete the old checkpoint {path}: {error}")

    def _clean_up_after_the_dead(self) -> None:
        # What a killed process of this machine left half written.
        for path in self._directory.glob(".writing-checkpoint-*"):
            match = re.match(r"^\.writing-.*-step-\d+-(.*)-(\d+)$", path.name)
            if match and match[1] == socket.gethostname() and not psutil.pid_exists(int(match[2])):
                shutil.rmtree(path, ignore_errors=True)

    def _explain(self, error: OSError, final: Path, existing: list[Path]) -> str:
        reason = _FULL.get(error.errno or 0, error.strerror or str(error))
        safe = f"The newest intact one is {existing[-1].name}." if existing else "There was none before it."
        return (
            f"Could not save checkpoint {final}: {reason}. Nothing saved before was touched. {safe} "
            "Free some space there, or give the run another folder with --directory."
        )


def open_checkpoint(path: str | os.PathLike) -> CheckpointReader:
    """Opens the checkpoint in the folder ``path`` after checking every file of it."""
    path = Path(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version, files, step = manifest["format"], manifest["files"], manifest["step"]
        _ = manifest["parts"]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"{MANIFEST} cannot be read ({error!r})") from error
    if version != FORMAT:
        raise CheckpointError(
            f"Checkpoint {path} has format {version}; this version of Repertory reads format {FORMAT}. "
            "Use the version that wrote it (manifest.json names it)."
        )
    for name, expected in files.items():
        file = _inside(path, name)
        if not file.is_file():
            raise _damaged(path, f"{name} is missing")
        size = file.stat().st_size
        if size != expected["size"]:
            kind = "truncated" if size < expected["size"] else "longer than written"
            raise _damaged(path, f"{name} is {kind}: it has {size} bytes, expected {expected['size']}")
        if _sha256(file) != expected["sha256"]:
            raise _damaged(path, f"{name} has been altered: its SHA-256 is not that of the manifest")
    return CheckpointReader(path, int(step), manifest)


def delete_checkpoint(path: Path) -> None:
    """Deletes what a checkpoint's manifest lists; the folder goes too if nothing else is in it."""
    files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    folders = {path}
    for name in files:
        _inside(path, name).unlink(missing_ok=True)
        folders.update(parent for parent in (path / name).parents if path in parent.parents)
    (path / MANIFEST).unlink()
    for folder in sorted(folders, key=lambda each: len(each.parts), reverse=True):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def torch_part(state: Any) -> Callable[[Path], None]:
    """A part that holds ``state``: nested dicts, lists and tuples of tensors, arrays and scalars."""
    return lambda path: save_state(state, path)


def package_versions() -> dict[str, str]:
    """The versions of what a run depends on, without importing any of it."""
    import platform
    from importlib import metadata

    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name in (
        "repertory",
        "torch",
        "numpy",
        "gymnasium",
        "dm-env",
        "dm-tree",
        "pyzmq",
        "ale-py",
        "dm-reverb",
    ):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _inside(path: Path, name: str) -> Path:
    """The file of a checkpoint; a manifest that points out of its own folder is refused."""
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        raise _damaged(path, f"{MANIFEST} names the file {name!r}, which is outside of it")
    return path / name


def _write_part(path: Path, part: Part) -> None:
    if isinstance(part, bytes | bytearray | memoryview):
        _write_file(path, part)
        return
    part(path)
    if not path.exists():
        raise CheckpointError(f"The writer of part {path.name!r} made neither a file nor a folder at {path}.")
    for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        disk.sync(file)


def _write_file(path: Path, content: bytes | bytearray | memoryview) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _describe(root: Path, path: Path) -> dict[str, dict[str, Any]]:
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return {
        file.relative_to(root).as_posix(): {"size": file.stat().st_size, "sha256": _sha256(file)}
        for file in files
    }


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"Checkpoint {path} is damaged: {reason}. It was not loaded.")


def _serial(path: Path) -> int:
    match = _NAME.match(path.name)
    return int(match[1]) if match else 0


def _step(path: Path) -> int:
    match = _NAME.match(path.name)
    return int(match[2]) if match else -1
