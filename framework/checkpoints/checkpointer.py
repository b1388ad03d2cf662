"""The checkpoints of one directory: numbered, the newest ones kept."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import secrets
import shutil
import threading
import warnings
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from framework.checkpoints import folder
from framework.checkpoints.folder import CheckpointError, CheckpointReader, Part

# Messages for the usual errors, by errno.
REASONS = {
    errno.ENOSPC: "no space is left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would pass the size limit of this process or file system",
    errno.EACCES: "permission is denied",
    errno.EROFS: "the file system is read-only",
}

_FULL = (errno.ENOSPC, errno.EDQUOT)

_NAME = re.compile(r"^checkpoint-(\d{6,})(?:-step-(\d+))?$")
_PACKAGES = (
    *("repertory", "torch", "numpy", "gymnasium", "dm-env", "dm-tree", "pyzmq", "ale-py", "dm-reverb"),
    *("mujoco", "box2d", "dm-control", "minatar", "minigrid", "pettingzoo", "envpool", "gymnasium-robotics"),
)


class Checkpointer:
    """Saves checkpoints in one directory and restores them.

    A save is atomic. If it fails, on a full disk for example, the error names the file and the newest
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
            if not folder.is_part_name(name):
                raise ValueError(
                    f"part name: got {name!r}, expected letters, digits, '.', '_' and '-', starting with a "
                    f"letter or digit, and not {folder.MANIFEST!r} or {folder.DONE!r}."
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
                folder.write_checkpoint(aside, final, parts, about)
            except OSError as error:
                if error.errno is None:
                    raise  # No file is at fault: a call was lost, say.
                safe = f"The newest one is {existing[-1]}" if existing else "There was none before it"
                elsewhere = ""
                if Path(os.fsdecode(error.filename or final)).is_relative_to(self.directory):
                    elsewhere = ", or give the run another folder with --directory"
                raise CheckpointError(
                    f"Checkpoint {final} was not saved: could not write {explain(error)}. Nothing "
                    f"saved before was touched. {safe}. {remedy(error)}{elsewhere}."
                ) from error
            for path in self.checkpoints()[: -self._keep]:
                try:
                    folder.delete(path)
                except (OSError, CheckpointError) as error:  # The new one is saved, so this is no failure.
                    warnings.warn(f"Could not delete the old checkpoint {path}: {error}")
            return final

    def checkpoints(self) -> list[Path]:
        """Returns the folders of all checkpoints, oldest first, without verifying their files."""
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.iterdir() if _NAME.match(path.name)]
        ours = [path for path in found if (path / folder.DONE).exists() or (path / folder.MANIFEST).exists()]
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
            return folder.open_checkpoint(path)
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
                reader = folder.open_checkpoint(path)
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
            places = (Path(os.path.expanduser(which)), self.directory / which)
            matching = [path for path in places if (path / folder.MANIFEST).exists()]
        if not matching:
            if not found:
                raise CheckpointError(f"There is no checkpoint in {self.directory}.")
            names = ", ".join(path.name for path in found)
            raise CheckpointError(
                f"There is no checkpoint {str(which)!r} in {self.directory}; it has {names}. Give 'latest', "
                "a step, or one of these."
            )
        return matching[0]

    def _remove_unfinished(self) -> None:
        """Removes unfinished checkpoints, whose lock the kernel released when their process was killed."""
        for path in self.directory.glob(".writing-checkpoint-*"):
            with contextlib.suppress(OSError), open(path / folder.DONE, "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)


def package_versions() -> dict[str, str]:
    """Returns the versions of the packages that a run depends on, without importing them."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _number(path: Path) -> int:
    return int(path.name.split("-")[1])


def explain(error: OSError) -> str:
    """Returns a message with the file that could not be written, and the reason."""
    reason = REASONS.get(error.errno or 0, error.strerror or str(error))
    return f"{error.filename}: {reason}" if error.filename else reason


def remedy(error: OSError) -> str:
    """Returns what to do about a file that could not be written, as the beginning of a sentence."""
    return "Free some space there" if error.errno in _FULL else "Make that place writable"
