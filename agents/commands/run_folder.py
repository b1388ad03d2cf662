"""The folder of a run: what is in it, who may write to it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import subprocess
import sys
import threading
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import agents
from agents.commands.errors import CommandError
from agents.commands.options import TrainOptions
from framework.checkpoints import Checkpointer, package_versions
from framework.loggers.files import explained
from framework.programs.run_config import RunConfig

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The files of one run.

    ::

        folder = RunFolder.create(path, "dqn", config, options, spec)
        with folder.locked():                    # one process at a time
            ...

    Attributes:
      path: the folder.
      agent: the agent's name.
      agent_config: its config's fields.
      options: what runs, and how.
      config: the settings of the program.
      environment_spec: the specs of the environment as text, to notice another one.
    """

    path: Path
    agent: str
    agent_config: Mapping[str, Any]
    options: TrainOptions
    config: RunConfig
    environment_spec: str

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpointer(self) -> Checkpointer:
        return Checkpointer(self.path / "checkpoints", keep=self.config.keep_checkpoints)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike,
        agent: str,
        agent_config: Any,
        options: TrainOptions,
        config: RunConfig,
        environment_spec: Any,
    ) -> RunFolder:
        """Makes the folder with its ``config.json``; CommandError if it holds a run or cannot be written."""
        path = Path(path)
        if (path / "config.json").exists():
            if Checkpointer(path / "checkpoints").checkpoints():
                advice = f"Go on with it: repertory train --resume {path}; or give"
            else:
                advice = "It ended before its first checkpoint, so that it cannot go on. Remove it, or give"
            raise CommandError(f"{path} holds a run already. {advice} another folder with --directory.")
        folder = cls(
            path, agent, dataclasses.asdict(agent_config), options, config, describe_spec(environment_spec)
        )
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.save()
        except OSError as error:
            raise CommandError(str(explained(error, path / "config.json").strerror)) from error
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike) -> RunFolder:
        """Reads a run's ``config.json``; CommandError if there is none or it cannot be understood."""
        path = Path(path)
        file = path / "config.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CommandError(
                f"{path} is no run: it has no config.json. Give the folder that `repertory train` made."
            ) from error
        except (OSError, ValueError) as error:
            raise CommandError(f"{file} cannot be read: {error}.") from error
        try:
            if content["format"] != FORMAT:
                raise CommandError(
                    f"{file} has format {content['format']}; this version reads format {FORMAT}. "
                    "Use the version that wrote it (see versions in the file)."
                )
            return cls(
                path,
                content["agent"],
                content["agent_config"],
                from_plain(TrainOptions, content["options"], str(file)),
                from_plain(RunConfig, content["run"], str(file)),
                content["environment_spec"],
            )
        except KeyError as error:
            raise CommandError(f"{file} has no entry {error}; it was altered.") from error

    def save(self) -> None:
        """Writes ``config.json``, replacing the old one in one step."""
        content = {
            "format": FORMAT,
            "agent": self.agent,
            "agent_config": dict(self.agent_config),
            "options": dataclasses.asdict(self.options),
            "run": dataclasses.asdict(self.config),
            "environment_spec": self.environment_spec,
            "command": " ".join(sys.argv),
            "started_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "versions": package_versions(),
            "git_commit": git_commits(),
        }
        self.write_json("config.json", content)

    def write_json(self, name: str, content: Any) -> None:
        """Writes one file of the folder, replacing an old one in one step."""
        beside = self.path / f".{name}.new"
        try:
            beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            os.replace(beside, self.path / name)
        finally:
            beside.unlink(missing_ok=True)

    def make_agent(self) -> Any:
        """The agent as it was configured; CommandError if there is none of its name any more."""
        try:
            agent, config = agents.find(self.agent).load()
        except ValueError as error:
            raise CommandError(f"{self.path}: {error}") from error
        return agent(from_plain(config, self.agent_config, str(self.path / "config.json")))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder for this process; CommandError if another process trains in it."""
        with open(self.path / "run.lock", "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CommandError(
                    f"{self.path} is being trained by process {self.running_pid()}. Stop it first: "
                    f"repertory stop {self.path}"
                ) from error
            file.seek(0)
            file.truncate()
            file.write(f"{os.getpid()}\n")
            file.flush()
            try:
                yield
            finally:
                file.seek(0)
                file.truncate()

    def running_pid(self) -> int | None:
        """The process that trains here now, or None."""
        try:
            with open(self.path / "run.lock", encoding="utf-8") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    text = file.read().strip()
                    return int(text) if text.isdigit() else None
        except FileNotFoundError:
            return None
        return None

    def wait_until_free(self, timeout: float | None) -> bool:
        """Waits for the process that trains here to let go; False after ``timeout`` seconds (None: never)."""

        def wait() -> None:
            with open(self.path / "run.lock", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_SH)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(timeout)
        return not thread.is_alive()


def default_path(agent: str, environment: str, seed: int) -> Path:
    """A new folder's name: ``runs/dqn-CartPole-v1-seed1-20260131-120000``."""
    environment = environment.partition(":")[2].replace("/", "-").replace(":", "-")
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{agent}-{environment}-seed{seed}-{now}"


def describe_spec(spec: Any) -> str:
    """The observation and action specs as text that is equal for equal environments."""
    return f"observations: {spec.observations!r}; actions: {spec.actions!r}"


def from_plain(cls: type, content: Mapping[str, Any], where: str) -> Any:
    """A dataclass from JSON; CommandError names a field that it does not have, or whose value cannot be."""
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(content) - set(hints))
    if unknown:
        raise CommandError(
            f"{where}: {cls.__name__} has no field {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(hints)}. Correct the file, or use the version that wrote it."
        )
    values = {}
    for name, value in content.items():
        kinds = (hints[name], *typing.get_args(hints[name]))  # JSON has no tuples
        is_tuple = any(typing.get_origin(kind) is tuple for kind in kinds)
        values[name] = tuple(value) if isinstance(value, list) and is_tuple else value
    try:
        return cls(**values)
    except ValueError as error:
        raise CommandError(f"{where}: {error} Correct the file.") from error


def git_commits() -> dict[str, str]:
    """The commits of Repertory's and of the working folder's checkouts, ``-dirty`` if changed since."""
    commits = {}
    for name, folder in (("repertory", Path(agents.__file__).parent), ("working_folder", Path.cwd())):
        git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        try:
            answer = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            continue  # no git, or no checkout: an installed package has versions only
        commits[name] = answer.stdout.strip()
    return commits
