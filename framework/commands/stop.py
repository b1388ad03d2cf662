"""`repertory stop`: stops a run cleanly from another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from framework import config_checks
from framework.commands.options import CommandError, Run, parse
from framework.runs.run_folder import RunFolder


@dataclass(frozen=True)
class StopOptions:
    """Stops a run; it saves a checkpoint first and can be resumed."""

    run: Run  # Folder of the run.
    timeout: float = 600.0  # Seconds to wait for its end; its last checkpoint may take minutes.

    def __post_init__(self) -> None:
        config_checks.types(self, may_be_infinite=["timeout"])
        config_checks.at_least(self, 0, "timeout")


def main(arguments: Sequence[str]) -> int:
    options = parse(StopOptions, arguments, prog="repertory stop")
    folder = RunFolder.open(options.run)
    pid = folder.lock.pid()
    if pid is None:
        raise CommandError(f"{folder.path} is not running.")
    folder.lock.ask_to_stop()
    if not folder.lock.wait_until_free(options.timeout):
        raise CommandError(
            f"{folder.path}: process {pid} has not ended after {options.timeout:g} seconds. Wait longer with "
            f"--timeout, or end it at once: kill -9 {pid}"
        )
    go_on = f"Go on with: repertory train --resume {folder.allowed}"
    begin = f"It has no checkpoint. {folder.again}"
    print(f"{folder.path} has stopped. {go_on if folder.checkpointer.latest() else begin}")
    return 0
