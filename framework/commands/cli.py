"""The command line: `repertory COMMAND …`."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from framework import config_checks, interrupts
from framework.checkpoints.checkpointer import explain
from framework.commands.options import UsageError
from framework.runs.run_folder import RunError
from launch import platforms
from launch.texts import printable

# By command, its module in framework.commands, imported when it runs, and its description.
COMMANDS = {
    "train": ("train", "train an agent: train AGENT [flags], or train --resume RUN"),
    "eval": ("evaluate", "play episodes with the policy of a run"),
    "video": ("video", "record a video of the policy of a run (mp4 or gif)"),
    "plot": ("plot", "draw the learning curves of runs, with a band over seeds (png)"),
    "report": (
        "report",
        "write a page about runs, report RUN --output report.html, or a folder for a model hub",
    ),
    "graph": ("graph", "show the program graph of an agent, as text and as svg"),
    "list": ("listing", "list agents, environments, engines and presets"),
    "export": ("export", "write the policy of a run as a file for programs without Repertory"),
    "serve": ("serve", "serve the policy of a run over HTTP: serve runs/cartpole"),
    "serve-environment": ("serve_environment", "serve environments to the actors of a run on another host"),
    "status": ("status", "show the state of a run"),
    "stop": ("stop", "stop a run cleanly, with a checkpoint"),
}
# Commands whose line may name modules of the current folder.
_NAMING = ("train", "graph", "list", "serve-environment")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      arguments: the command line. None is this process's, which the command then is.

    Returns:
      The exit code: 0, 1 after an error, 2 for a wrong command line, 130 after Ctrl-C.
    """
    if arguments is None:
        platforms.open_standard_streams()
        return interrupts.ending(_run)
    arguments = [_expanded(argument) for argument in arguments]
    for stream in (sys.stdout, sys.stderr):  # The name of a file need not be UTF-8, nor a terminal.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    command = arguments[0]
    if command == "--version":
        print(metadata.version("repertory"))
        return 0
    if command not in COMMANDS:
        hint = config_checks.nearest(command, COMMANDS)
        _complain(f"Unknown command {command!r}; the commands are {', '.join(COMMANDS)}.{hint}")
        return 2
    flags = {argument.split("=")[0] for argument in arguments}
    # Agents and environments may lie in the current folder, which may also be somebody's run.
    of_folder = "--allow" in flags or (command in _NAMING and "--resume" not in flags)
    if of_folder and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module = importlib.import_module(f"framework.commands.{COMMANDS[command][0]}")
    try:
        code: int = module.main(arguments[1:])
        return code
    except RunError as error:
        if interrupts.happened(error):
            raise
        _complain(str(error))
        return 2 if isinstance(error, UsageError) else 1
    except OSError as error:
        # It names no file, or comes from the environment, whose traceback is needed.
        if error.filename is None or command in ("train", "eval"):
            raise
        _complain(f"{command}: could not use {explain(error)}. Give another place, or make this one usable.")
        return 1


def _expanded(argument: str) -> str:
    """The argument with the home folder in place of `~`, which a shell leaves in `--flag=~/folder`."""
    flag, equals, value = argument.partition("=")
    if flag.startswith("-"):
        return f"{flag}{equals}{os.path.expanduser(value)}"
    return os.path.expanduser(argument)


def _run() -> int:
    """Runs the command of this process, and writes what waits of its output."""
    try:
        try:
            return main(sys.argv[1:])
        finally:
            print(end="", flush=True)
    except OSError as error:
        is_full = error.errno == errno.ENOSPC and error.filename is None
        if error.errno != errno.EPIPE and (not is_full or {"train", "eval"} & {*sys.argv[1:2]}):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Else the interpreter fails on the rest when it ends.
        if is_full:  # If not, the reader has exited, as in `repertory list | head`.
            _complain(f"could not write the output: {error.strerror}. Make room, or write it elsewhere.")
        return 1


def usage() -> str:
    """Returns the text of `repertory --help`."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: repertory COMMAND ...\n\nReinforcement learning as program graphs.\n\ncommands:\n"
        f"{lines}\n\n`repertory COMMAND --help` shows the flags of a command."
    )


def _complain(text: str) -> None:
    print(printable(f"error: {text}"), file=sys.stderr)
