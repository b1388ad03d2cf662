"""The run of `repertory train`: its end and its errors, as a command tells them."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Callable, Iterator
from typing import Any

import launch
from framework.checkpoints import CheckpointError
from framework.commands.options import CommandError
from framework.experiments.running import describe_result as describe_result
from framework.loggers.files import is_explained
from framework.runs.run_folder import RunFolder
from framework.runs.run_lock import unwritable
from launch.texts import printable

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def exit_code(folder: RunFolder, run: Callable[[], Any]) -> int:
    """Calls `run`, which runs the program of `folder`, and returns the exit code of the command."""
    try:
        run()
    except launch.ProgramInterrupted as stopped:
        return 128 + stopped.signal
    except launch.LaunchError as error:
        raise CommandError(_explain(error, folder)) from error
    return 0


def _explain(error: Exception, folder: RunFolder) -> str:
    cause = error.__cause__
    node = getattr(error, "node", None)
    if isinstance(cause, CheckpointError):
        return str(cause)  # Names the file; the node that asked for the checkpoint did not fail.
    if node is not None and isinstance(cause, OSError) and is_explained(cause):
        return f"node {node!r}: {unwritable(folder.path, cause)}"
    reason, _, log = str(error).partition("\n\n")
    if shown := getattr(error, "frames", "") or log:
        print(printable(shown), file=sys.stderr)  # First, so that the reason is at the bottom.
    path = folder.path
    logs = f"; logs of its nodes are in {path / 'logs'}" if (path / "logs").is_dir() else ""
    return f"{reason}\nThe run ended in {path}{logs}."


@contextlib.contextmanager
def writing(folder: RunFolder) -> Iterator[None]:
    """Turns errors of files into one clear error. Those of the nodes are of another kind."""
    try:
        yield
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        if error.filename is None and error.errno not in _OF_DISKS and not is_explained(error):
            raise
        raise CommandError(str(unwritable(folder.path, error))) from error
