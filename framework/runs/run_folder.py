"""The folder of a run: its files and its lock."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil

import framework
import launch
from framework import core, specs
from framework.checkpoints import Checkpointer, CheckpointError, CheckpointReader, package_versions
from framework.environments.suites import SUITES
from framework.loggers.files import explained, is_explained, read_jsonl
from framework.objects import load_object, target_of
from framework.runs import config_file, trust
from framework.runs.callbacks import Callback
from framework.runs.registry import describe_agent, find_agent
from framework.runs.run_config import RunConfig

FORMAT = 3
#: The settings that may differ when a run continues, beside its engine and its restarts.
MAY_CHANGE = ("max_env_steps", "max_learner_steps", "target_return", "device", "inference_device")
_UNRECORDED = "not recorded"
_CLOCK_S = 5.0  # Seconds by which the time of a process's start may differ.
# What `run.lock` says of the process that has it. A line of an earlier version has no folder.
_LAUNCHER = re.compile(r"(?P<pid>[0-9]{1,9})( (?P<started>[0-9]+) (?P<host>\S+)( (?P<folder>[0-9]+))?)?\s*\Z")
_QUERY = 1.0  # Seconds. `running_pid` of another process has the lock for a moment; a start waits that long.


class RunError(Exception):
    """Raised for a problem with a run's folder. The text says how to fix it."""


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The files of one run. A program with a directory writes `config.yaml` when it starts.

    ```python
    folder = RunFolder.describe(agent, "gymnasium:CartPole-v1", config, spec)
    folder.record()
    with folder.locked():                    # one process at a time
        ...
    agent = RunFolder.open(path).make_agent(allow=("my_agents",))
    ```

    Attributes:
      agent: the agent's name, or `module:object`.
      agent_config: the fields of its config; empty if it has no config.
      environment: its name, or `module:function`; None if the factory cannot be imported again.
      config: the settings of the program.
      environment_spec: the specs of the environment as text, to detect a changed environment.
      networks_fn: the agent's, as `module:function`; None without one, empty if it cannot be imported again.
      engine: the engine that runs the program.
      restarts: how often each node may fail and be restarted.
    """

    agent: str
    agent_config: Mapping[str, Any]
    environment: str | None
    config: RunConfig
    environment_spec: str
    networks_fn: str | None = None
    engine: str = "processes"
    restarts: int = 0

    @property
    def path(self) -> Path:
        """The folder."""
        assert self.config.directory is not None
        return Path(self.config.directory)

    @property
    def quoted(self) -> str:
        """The path of the folder, for the command line of a shell."""
        return shlex.quote(str(self.path))

    @property
    def environment_name(self) -> str:
        """The environment's name, for output."""
        return self.environment or "an environment of its own"

    @property
    def metrics(self) -> Path:
        """The file with the rows of metrics."""
        return self.path / "metrics.jsonl"

    def rows(self) -> list[dict[str, Any]]:
        """Reads the rows of metrics; none if nothing was written yet."""
        return list(read_jsonl(self.metrics)) if self.metrics.exists() else []

    @property
    def has_rows(self) -> bool:
        """Whether rows of metrics were written. Does not read them."""
        return self.metrics.exists() and self.metrics.stat().st_size > 0

    @property
    def checkpointer(self) -> Checkpointer:
        """The checkpoints of the run."""
        return Checkpointer(self.path / "checkpoints", keep=self.config.keep_checkpoints)

    @classmethod
    def describe(
        cls,
        agent: core.Agent,
        environment: str | Callable[..., Any],
        config: RunConfig,
        spec: specs.EnvironmentSpec,
    ) -> RunFolder:
        """The run of `agent` in `environment`. Writes nothing."""
        name, fields = describe_agent(agent)
        plain = json.loads(json.dumps(fields, default=_plain))
        if not isinstance(environment, str):
            target = target_of(environment) or ""
            environment = "" if target.partition(":")[0] in SUITES else target
        # Equal for equal environments.
        described = f"observations: {spec.observations!r}; actions: {spec.actions!r}"
        networks_fn = None
        if agent.networks_fn is not None and not agent.made_by:  # What made the agent makes it again.
            networks_fn = target_of(agent.networks_fn) or ""
        return cls(name, plain, environment or None, config, described, networks_fn)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Reads a run's `config.yaml`. Raises RunError if the file is missing or invalid."""
        file = Path(path) / "config.yaml"
        try:
            content = config_file.read(file)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RunError(
                f"{path} is not a run: it has no config.yaml. Give the directory of a program that has run."
            ) from error
        except (OSError, ValueError) as error:
            raise RunError(f"{file} cannot be read: {error}") from error
        try:
            recorded = content.pop(config_file.RECORDED)
            if recorded["format"] != FORMAT:
                raise RunError(
                    f"{file} has format {recorded['format']}; this version reads format {FORMAT}. "
                    "Use the version that wrote it (see versions in the file)."
                )
            own = {name: content.pop(name) for name in ("agent", "environment", "engine", "restarts")}
            content.pop("inference_messages", None)  # A setting of version 0.2 that changed no result.
            if content.get("inference") == "alternating":  # So did this value.
                content["inference"] = "local"
            fields = [field.name for field in dataclasses.fields(RunConfig) if field.name in content]
            settings = {name: content.pop(name) for name in fields}
            settings["directory"] = os.fspath(path)
            config = config_file.from_plain(RunConfig(), settings, str(file))
            own["environment_spec"] = recorded["environment_spec"]
            own["networks_fn"] = recorded.get("networks_fn")
            content.update(recorded.get("agent_config", {}))
        except KeyError as error:
            raise RunError(f"{file} has no entry {error}; it was altered.") from error
        except ValueError as error:
            raise RunError(str(error)) from error
        return cls(agent_config=content, config=config, **own)

    def restore(self, which: str | int | os.PathLike[str] | None = None) -> CheckpointReader:
        """Opens a checkpoint, as `Checkpointer.restore` does. Raises RunError with the run's own advice."""
        try:
            return self.checkpointer.restore(which)
        except CheckpointError as error:
            names = ", ".join(path.name for path in self.checkpointer.checkpoints())
            if names:
                raise RunError(f"{error} Choose another with --checkpoint: {names}.") from error
            pid = self.running_pid()
            if pid not in (None, os.getpid()):
                raise RunError(
                    f"{self.path} has no checkpoint yet, and process {pid} trains in it. Wait for the first "
                    f"one, or stop the run, which writes one: repertory stop {self.quoted}"
                ) from error
            raise RunError(str(error)) from error

    def record(self, engine: str | None = None) -> None:
        """Writes `config.yaml` with the node's engine unless it is equal. Keeps the recorded restarts.

        If the run is interrupted from now on, it has no result, so an earlier end's goes.
        """
        (self.path / "result.json").unlink(missing_ok=True)
        new, engine = self, engine or launch.get_node_context().engine
        if (self.path / "config.yaml").exists():
            known = RunFolder.open(self.path)
            new = dataclasses.replace(self, engine=engine, restarts=known.restarts)
            if _as_text(known) == _as_text(new):
                return
        dataclasses.replace(new, engine=engine).save()

    def save(self) -> None:
        """Makes the folder and writes `config.yaml`. Raises RunError if it cannot be written.

        The command, time and versions of the first start stay; later starts' follow in `resumed`.
        """
        start: dict[str, Any] = {
            "command": shlex.join(sys.argv),
            "started_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "versions": package_versions(),
            "git_commit": git_commits(),
        }
        file = self.path / "config.yaml"
        if file.exists():
            before = config_file.read(file)[config_file.RECORDED]
            start = {**{name: before[name] for name in start}, "resumed": [*before.get("resumed", []), start]}
        settings = {name: getattr(self, name) for name in ("agent", "environment", "engine", "restarts")}
        settings |= dataclasses.asdict(self.config)
        # Fields of the agent's config with the names of other settings.
        hidden = {name: value for name, value in self.agent_config.items() if name in settings}
        del settings["directory"]  # The folder may be moved.
        content = {
            **settings,
            **{name: value for name, value in self.agent_config.items() if name not in hidden},
            config_file.RECORDED: {
                "format": FORMAT,
                "environment_spec": self.environment_spec,
                "networks_fn": self.networks_fn,
                **({"agent_config": hidden} if hidden else {}),
                **start,
            },
        }
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            config_file.write(file, json.loads(json.dumps(content, default=_plain)))
        except OSError as error:
            raise self.unwritable(error, file) from error

    def check_same(self) -> None:
        """Raises RunError if the folder holds a run of another agent, environment, or other settings."""
        if not (self.path / "config.yaml").exists():
            return
        known = RunFolder.open(self.path)
        if known.agent != self.agent:
            raise RunError(
                f"{self.path} is a run of {known.agent!r}, not of {self.agent!r}. Use another folder."
            )
        if known.environment_spec != self.environment_spec:
            raise RunError(
                f"{self.path}: the environment {self.environment!r} is not the one that the run was trained "
                f"in. It was:\n  {known.environment_spec}\nand now is:\n  {self.environment_spec}\n"
                "Install the version of it that config.yaml names, or start a new run."
            )
        if known.environment != self.environment and _has_suite(known) and _has_suite(self):
            raise RunError(
                f"{self.path} is a run in {known.environment!r}, not in {self.environment!r}. Use another "
                "folder."
            )
        if self.has_rows or self.checkpointer.latest() is not None:  # Else it left nothing to continue.
            parts = [
                (dataclasses.asdict(run.config), run.agent_config, {"networks_fn": run.networks_fn})
                for run in (known, self)
            ]
            changed = "; ".join(filter(None, map(_changed, *parts)))
            if changed:
                raise RunError(keeps_settings(self.path, changed, "Restore them, or give another directory."))

    def check_limits(self, reader: CheckpointReader) -> None:
        """Raises RunError if the run has no steps left after a checkpoint."""
        counts = reader.state("counter")["counts"] if "counter" in reader.names else {}
        has_ended = (self.path / "result.json").exists()
        for kind, made in (("env", reader.step), ("learner", counts.get("learner_steps", 0))):
            limit = getattr(self.config, f"max_{kind}_steps")
            # A run without a result was interrupted in its last evaluation, which it repeats now.
            if limit is not None and (made > limit or (made == limit and has_ended)):
                raise RunError(
                    f"{self.path} has made {made:,} {kind} steps, and its limit is {limit:,}. Give it more: "
                    f"--max-{kind}-steps {2 * made} (RunConfig.max_{kind}_steps)."
                )

    def check_exact(self, reader: CheckpointReader) -> None:
        """Raises RunError if the run ended on the engine `serial`, and is to go on there with other limits.

        At its end a run cuts the last grants of steps, and the learner draws the last samples. It would
        therefore not go on as a run that had the new limits from the beginning.
        """
        ended_at = reader.manifest.get("note", {}).get("ended_at", {})
        changed = differences(ended_at, {name: self.config.limits[name] for name in ended_at})
        if changed:
            raise RunError(
                f"{self.path}: {changed}. A run that has ended on engine 'serial' is not extended there, "
                "because it would not be the run that had these limits from the beginning. Start a new run "
                "with them; or go on with this one, not exactly, on another engine, such as 'threads'."
            )

    def unwritable(self, error: OSError, file: Path | None = None) -> RunError:
        """The error for a file that could not be written; has advice on the folder if it is in this one.

        Args:
          error: the system's error, or one that `explained` returned.
          file: its file, if the error has none.
        """
        text = str(error.strerror)
        if not is_explained(error):
            text = str(explained(error, error.filename or file or "a file").strerror)
        is_own = text.startswith((f"could not write {self.path}{os.sep}", f"could not write {self.path}:"))
        return RunError(f"{text} Or choose another folder with --directory." if is_own else text)

    def write_json(self, name: str, content: Any) -> None:
        """Writes one file of the folder. Replaces an old file atomically."""
        config_file.replace(self.path / name, json.dumps(content, indent=1) + "\n")

    def with_device(self, device: str) -> RunFolder:
        """The run with its learner on `device`; the same run if its agent's config has no `device`."""
        if "device" not in self.agent_config:
            return self
        return dataclasses.replace(self, agent_config={**self.agent_config, "device": device})

    def check_names(self, allow: Collection[str]) -> None:
        """Raises RunError if the run names code that is not registered; see `framework.runs.trust`.

        Args:
          allow: modules whose objects it may name.
        """
        own: dict[str, Any] = {
            "agent": self.agent,
            "environment": self.environment,
            "networks_fn": self.networks_fn,
        }
        try:
            trust.check({"agent_config": self.agent_config, **dataclasses.asdict(self.config), **own}, allow)
        except ValueError as error:
            raise RunError(f"{self.path}: {error}") from error

    def make_agent(self, allow: Collection[str] = ()) -> core.Agent:
        """The agent as configured in the run. Nothing is imported if one of the run's names is refused.

        Args:
          allow: modules whose objects the run may name; see `check_names`.

        Raises:
          RunError: The agent cannot be found, or the run names code of other modules.
        """
        self.check_names(allow)
        try:
            entry = find_agent(self.agent)
            config = entry.make_config()
            if not self.agent_config:
                return entry.make()
        except (ValueError, TypeError) as error:
            raise RunError(f"{self.path}: {error}") from error
        for name, value in self.agent_config.items():
            if isinstance(value, dict) and _UNRECORDED in value:
                raise RunError(
                    f"{self.path}: {name} of {self.agent!r} was {value[_UNRECORDED]}, which config.yaml "
                    "cannot hold. Use numbers, strings, None, and tuples of them in the agent's config."
                )
        try:
            config = config_file.from_plain(config, self.agent_config, f"{self.path}/config.yaml")
        except ValueError as error:
            raise RunError(str(error)) from error
        agent = entry.make(config)
        if self.networks_fn is not None:
            agent.networks_fn = self._networks_fn()
        return agent

    def _networks_fn(self) -> core.NetworksFn:
        if not self.networks_fn:
            raise RunError(
                f"{self.path}: its networks_fn was a function that cannot be imported by name. Give the "
                "agent a function of a module."
            )
        try:
            networks_fn: core.NetworksFn = load_object(self.networks_fn)
        except (ImportError, AttributeError, ValueError) as error:
            raise RunError(f"{self.path}: networks_fn {self.networks_fn!r}: {error}") from error
        return networks_fn

    def environment_factory(self) -> str:
        """The argument of `environments.make`. Raises RunError if it was a factory that has no name."""
        if self.environment is None:
            raise RunError(
                f"{self.path}: its environment was a function that cannot be imported by name. Give "
                "make_program the environment's name, or a function of a module."
            )
        for field in ("environment_options", "evaluation_options"):
            for name, value in getattr(self.config, field).items():
                if isinstance(value, dict) and _UNRECORDED in value:
                    raise RunError(
                        f"{self.path}: {field}: {name} was {value[_UNRECORDED]}, which config.yaml "
                        "cannot hold. Use numbers, strings, None, and lists of them."
                    )
        return self.environment

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Removes a new `config.yaml` if the run ends before its first row and checkpoint.

        The start has failed then, and the folder does not hold a run. The logs stay.
        """
        file = self.path / "config.yaml"
        is_new = not file.exists()
        try:
            yield
        finally:
            made = self.has_rows or (self.path / "result.json").exists() or self.checkpointer.checkpoints()
            if is_new and not made:
                with contextlib.suppress(OSError):  # The error of the run is the one to report.
                    file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[IO[str]]:
        """Makes the folder and locks it for this program. Raises RunError if another one trains in it.

        The lock belongs to the file that it gives: it lasts until the block ends, or until all processes that
        have the file have ended.
        """
        lock = self.path / "run.lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            opened = self._open_lock("a+")
        except OSError as error:
            raise self.unwritable(error, lock) from error
        with opened as file:
            if not _lock(file, fcntl.LOCK_EX, _QUERY):
                process = "another process" if (pid := self.running_pid()) is None else f"process {pid}"
                raise RunError(
                    f"{self.path} is being trained by {process}. Stop it first: repertory stop {self.quoted}"
                )
            os.ftruncate(file.fileno(), 0)
            started, folder = psutil.Process().create_time(), self.path.stat().st_ino
            try:
                file.write(f"{os.getpid()} {started:.0f} {socket.gethostname()} {folder}\n")
                file.flush()
            except OSError as error:
                raise self.unwritable(error, lock) from error
            try:
                yield file
            finally:
                os.ftruncate(file.fileno(), 0)
                fcntl.flock(file, fcntl.LOCK_UN)  # A process that was forked meanwhile has the file, too.

    @contextlib.contextmanager
    def continuing(self) -> Iterator[IO[str]]:
        """As `locked`, if the run is new or has steps left."""
        with self.locked() as file:
            reader = self.checkpointer.newest_intact()
            if reader is not None:
                self.check_limits(reader)
            yield file

    def running_pid(self) -> int | None:
        """The process that currently trains in the folder, or None."""
        found = _LAUNCHER.match(self._holder() or "")
        return int(found["pid"]) if found else None

    def _holder(self) -> str | None:
        """What the process that has the lock says of itself; None if none has it, or it begins or ends."""
        try:
            with self._open_lock("r") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return file.read(1000).strip() or None
        except FileNotFoundError:
            pass
        return None

    def running_process(self, _looks: int = 3) -> psutil.Process | None:
        """As `running_pid`. The process has the lock of the folder, so that no other can be named.

        Raises:
          RunError: That process has ended, is not one of this machine, or does not have the lock.
        """
        if (holder := self._holder()) is None:
            return None
        found = _LAUNCHER.match(holder)
        if found is None or not found["host"]:
            raise RunError(f"{self.path}/run.lock: got an altered lock. Stop the process that holds it.")
        pid = int(found["pid"])
        with self._open_lock("r") as file:
            holders = _holders(file, pid)
        if found["host"] != socket.gethostname():
            raise RunError(
                f"{self.path} is being trained by process {pid} of the host {found['host']}, not of this one."
            )
        try:
            process = psutil.Process(pid)
            is_same = pid in holders and abs(process.create_time() - float(found["started"])) < _CLOCK_S
        except psutil.NoSuchProcess:
            is_same = False
        if not is_same:
            # It has ended as it should, or had given the lock back for a moment when its holders were read.
            if self._holder() != holder or _looks > 1:
                return self.running_process(_looks - 1)
            raise RunError(
                f"{self.path}: process {pid}, which trained in it, is not one of this machine, or has died. "
                "In that case its nodes save what they have, and end by themselves."
            )
        if int(found["folder"] or 0) != self.path.stat().st_ino:
            raise RunError(
                f"{self.path}/run.lock: got the lock of another folder. Stop the run in that one, or move "
                "the files of this one to a new folder."
            )
        return process

    def wait_until_free(self, timeout: float | None) -> bool:
        """Waits until no process trains in the folder; False after `timeout` seconds (None: no limit)."""
        with self._open_lock("r") as file:
            return _lock(file, fcntl.LOCK_SH, timeout)

    def _open_lock(self, mode: str) -> IO[str]:
        """Opens `run.lock`. A link could lead to any file of this user, or to the lock of another run."""
        path = self.path / "run.lock"
        try:
            return open(path, mode, encoding="utf-8", errors="replace", opener=config_file.no_link)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise RunError(f"{path}: got a link, expected a file. Remove it.") from error
            raise


def _holders(file: IO[str], pid: int) -> set[int]:
    """The processes that have locked a file for themselves; `pid` if it has the file, without a list."""
    inode = os.fstat(file.fileno()).st_ino
    try:
        # "1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE …"
        with open("/proc/locks", encoding="ascii") as locks:
            rows = [line.split() for line in locks if "->" not in line]
        return {int(row[4]) for row in rows if row[3] == "WRITE" and row[5].endswith(f":{inode}")}
    except FileNotFoundError:
        with contextlib.suppress(psutil.Error):
            opened = [each.path for each in psutil.Process(pid).open_files()]
            if any(os.path.exists(path) and os.stat(path).st_ino == inode for path in opened):
                return {pid}
        return set()


def _lock(file: IO[str], kind: int, timeout: float | None) -> bool:
    """Locks an open file, as `fcntl.flock` does; False after `timeout` seconds (None: no limit)."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        pass
    # The lock belongs to the open file, not to a descriptor. Nothing can end the wait of the thread: if it
    # gets the lock too late, it has the last descriptor, and gives the lock back by closing it.
    descriptor = os.dup(file.fileno())
    locked = []

    def wait() -> None:
        try:
            fcntl.flock(descriptor, kind)
            locked.append(True)
        finally:
            os.close(descriptor)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
    return bool(locked)


class RecordRun(Callback):
    """Writes the settings of a resumed run with its first row. An attempt that fails earlier keeps them."""

    def __init__(self, run: RunFolder):
        self._run: RunFolder | None = run

    def on_row(self, label: str, row: dict[str, Any], snapshot: dict[str, Any]) -> None:
        if self._run is not None:
            self._run.record()
            self._run = None


def differences(expected: Mapping[str, Any], got: Mapping[str, Any]) -> str:
    """Which settings differ, as in `learning_rate: got 0.01, expected 0.001`; empty if none does."""
    names = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
    return "; ".join(f"{name}: got {got.get(name)!r}, expected {expected.get(name)!r}" for name in names)


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The `differences` that a run that continues may not have, as far as `config.yaml` can hold them."""
    plain = [json.loads(json.dumps(of, default=_plain)) for of in (old, new)]
    both = [{name: of[name] for name in old if name in new} for of in plain]
    names = [name for name in both[0] if _UNRECORDED not in json.dumps([of[name] for of in both])]
    kept = [name for name in names if name not in (*MAY_CHANGE, "directory")]
    return differences(*({name: of[name] for name in kept} for of in both))


def keeps_settings(path: Path, changed: str, advice: str) -> str:
    """The error for a run in `path` that is to continue with the `differences` in `changed`."""
    may = f"{', '.join(MAY_CHANGE)}, engine, and restarts"
    return f"{path}: {changed}. A run that continues keeps its settings, except for {may}. {advice}"


def changed_settings(directory: str | os.PathLike[str], agent: core.Agent) -> str:
    """Which settings of `agent` differ from the run's in `directory`; empty if none does."""
    _, fields = describe_agent(agent)
    plain = json.loads(json.dumps(fields, default=_plain))
    return differences(RunFolder.open(directory).agent_config, plain)


def _has_suite(run: RunFolder) -> bool:
    """Whether the name of the environment says which it is. A function or an address may be another now."""
    name = run.environment or ""
    return name.partition(":")[0] in SUITES and "://" not in name


def _as_text(run: RunFolder) -> str:
    return json.dumps(dataclasses.asdict(run), default=_plain, sort_keys=True)


def _plain(value: Any) -> Any:
    """Converts a numpy number to a Python number, and a value that JSON cannot hold to its name."""
    return value.item() if isinstance(value, np.generic) else {_UNRECORDED: repr(value)}


def git_commits() -> dict[str, str]:
    """The git commits of Repertory and of the working folder, with `-dirty` after uncommitted changes."""
    commits = {}
    for name, folder in (("repertory", Path(framework.__path__[0])), ("working_folder", Path.cwd())):
        try:
            if name == "repertory":  # It may be in an environment within another repository.
                _git(folder, "ls-files", "--error-unmatch", "__init__.py")
            commits[name] = _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
        except (OSError, subprocess.SubprocessError):
            continue  # No git, or no checkout: an installed package has only a version.
    return commits


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
