"""The checkpoints of one directory: numbered, verified when they are read, with the newest ones kept."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import shutil
import socket
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from framework.checkpoints import folder
from framework.checkpoints.folder import DONE, MANIFEST, CheckpointError, Part
from framework.checkpoints.state import load_state

_NAME = re.compile(r"^checkpoint-(\d{6,})(?:-step-(\d+))?$")
_ASIDE = re.compile(r"^\.writing-checkpoint-.*--(.*)--(\d+)$")  # The host and process that write it.
_PART_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
_PACKAGES = ("repertory", "torch", "numpy", "gymnasium", "dm-env", "dm-tree", "pyzmq", "ale-py", "dm-reverb")


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
            writer = f"{secrets.token_hex(4)}--{socket.gethostname()}--{os.getpid()}"
            about = {
                "step": None if step is None else int(step),
                "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "versions": package_versions(),
                "note": dict(note or {}),
            }
            try:
                self._remove_unfinished()
                folder.write(self.directory / f".writing-{final.name}-{writer}", final, parts, about)
            except OSError as error:
                safe = f"The newest intact one is {existing[-1]}" if existing else "There was none before it"
                raise CheckpointError(
                    f"Checkpoint {final} was not saved: could not write {folder.explain(error)}. Nothing "
                    f"saved before was touched. {safe}. Free some space there, or give the run another "
                    "folder with --directory."
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
            if path == found[-1] and found[1:]:
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
        names = ", ".join(path.name for path in found) or "none"
        if which == "latest":
            if found:
                return found[-1]
            raise CheckpointError(
                f"There is no checkpoint in {self.directory}. Check the folder, or start a new run."
            )
        if which == "previous":
            if found[1:]:
                return found[-2]
            raise CheckpointError(f"There is no previous checkpoint in {self.directory}; it has {names}.")
        if isinstance(which, int) or (isinstance(which, str) and which.isdigit()):
            at_step = [path for path in found if path.name.endswith(f"-step-{int(which)}")]
            if at_step:
                return at_step[-1]
            raise CheckpointError(f"No checkpoint of step {which} in {self.directory}; it has {names}.")
        for path in (Path(which), self.directory / which):
            if (path / MANIFEST).exists():
                return path
        raise CheckpointError(
            f"checkpoint: got {which!r}, expected 'latest', 'previous', a step, or one of: {names}."
        )

    def _remove_unfinished(self) -> None:
        """Removes unfinished checkpoints of killed processes of this machine."""
        for path in self.directory.glob(".writing-checkpoint-*"):
            match = _ASIDE.match(path.name)
            if match and match[1] == socket.gethostname() and not psutil.pid_exists(int(match[2])):
                shutil.rmtree(path, ignore_errors=True)


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
    """Verifies every file of the checkpoint in the folder `path` and opens it."""
    return CheckpointReader(Path(path), folder.verify(Path(path)))


def package_versions() -> dict[str, str]:
    """Returns the versions of the packages that a run depends on, without importing them."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _number(path: Path) -> int:
    match = _NAME.match(path.name)
    return int(match[1]) if match else 0
