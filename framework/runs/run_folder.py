"""The folder of a run, and its files."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import launch
from framework import config_checks, core, specs
from framework.checkpoints import Checkpointer, CheckpointError, CheckpointReader, package_versions
from framework.config_checks import RaisedAs
from framework.environments.suites import known_suites
from framework.loggers.files import read_jsonl
from framework.objects import load_object, target_of
from framework.runs import config_file, recorded_specs, trust
from framework.runs.checkpoints import run_checkpoints
from framework.runs.presets import find_preset
from framework.runs.registry import describe_agent, find_agent
from framework.runs.run_config import RunConfig
from framework.runs.run_lock import RunError as RunError
from framework.runs.run_lock import RunLock, unwritable

FORMAT = 4  # Format 3 has the text of the specs.
#: The settings that may differ when a run continues, beside its engine and its restarts.
_LIMITS = ("max_env_steps", "max_learner_steps", "target_return")
MAY_CHANGE = (*_LIMITS, "device", "devices", "inference_device", "step_mode")
_UNRECORDED = "not recorded"


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The files of one run. A program with a directory writes `config.yaml` when it starts.

    ```python
    folder = RunFolder.describe(agent, "gymnasium:CartPole-v1", config, spec)
    folder.record()
    with folder.lock.held():                    # one process at a time
        ...
    agent = RunFolder.open(path).make_agent(allow=("my_agents",))
    ```

    Attributes:
      agent: the agent's name, or `module:object`.
      agent_config: the fields of its config; empty if it has no config.
      environment: its name, or `module:function`; None if the factory cannot be imported again.
      config: the settings of the program.
      environment_spec: the specs of the environment, to detect a changed one; see `recorded_specs`.
      networks_fn: the agent's, as `module:function`; None without one, empty if it cannot be imported again.
      engine: the engine that runs the program.
      restarts: how often each node may fail and be restarted.
    """

    agent: str
    agent_config: Mapping[str, Any]
    environment: str | None
    config: RunConfig
    environment_spec: Any
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
    def allowed(self) -> str:
        """`quoted`, and the flags that allow what the run names and is not registered."""
        return f"{self.quoted} {trust.flags(trust.named(self._names()))}".rstrip()

    @property
    def modules(self) -> list[str]:
        """The modules of what the run names and is not registered; see `check_names`."""
        return sorted({module for _, _, module in trust.named(self._names())})

    @property
    def again(self) -> str:
        """How to begin a run with these settings, for a run that cannot go on."""
        if self.environment is None:
            return "Begin it again with make_program and this directory."
        file = self.allowed.replace(self.quoted, shlex.quote(f"{self.path}/config.yaml"), 1)
        return f"Begin it again, in a new folder: repertory train --config {file}"

    @property
    def lock(self) -> RunLock:
        """The lock of the folder."""
        return RunLock(self.path)

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
    def result(self) -> dict[str, Any] | None:
        """What `result.json` holds; None before the run has ended."""
        file = self.path / "result.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    @property
    def has_rows(self) -> bool:
        """Whether rows of metrics were written. Does not read them."""
        return self.metrics.exists() and self.metrics.stat().st_size > 0

    @property
    def checkpointer(self) -> Checkpointer:
        """The checkpoints of the run."""
        return run_checkpoints(self.config)

    @classmethod
    def describe(
        cls,
        agent: core.Agent,
        environment: str | Callable[..., Any] | None,
        config: RunConfig,
        spec: specs.EnvironmentSpec,
    ) -> RunFolder:
        """The run of `agent` in `environment`. Writes nothing."""
        name, fields = describe_agent(agent)
        if environment is not None and not isinstance(environment, str):
            target = target_of(environment) or ""
            environment = "" if target.partition(":")[0] in known_suites() else target
        networks_fn = None
        if agent.networks_fn is not None and not agent.made_by:  # What made the agent makes it again.
            networks_fn = target_of(agent.networks_fn) or ""
        return cls(
            name, plain(fields), environment or None, config, recorded_specs.recorded(spec), networks_fn
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Reads a run's `config.yaml`. Raises RunError if the file is missing or invalid."""
        path = os.path.expanduser(path)
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
            if recorded["format"] not in (3, FORMAT):
                raise RunError(
                    f"{file} has format {recorded['format']}; this version reads format {FORMAT}. "
                    "Use the version that wrote it (see versions in the file)."
                )
            own = {name: content.pop(name) for name in ("agent", "environment", "engine", "restarts")}
            # Settings of version 0.2, which changed no result.
            for name in ("inference_messages", "inference_min_batch"):
                content.pop(name, None)
            if content.pop("compile_loss", False):  # The name of this mode in version 0.2.
                content["step_mode"] = "compile"
            if content.get("inference") == "alternating":  # This value is gone, too.
                content["inference"] = "local"
            fields = [field.name for field in dataclasses.fields(RunConfig) if field.name in content]
            settings = {name: content.pop(name) for name in fields}
            settings["directory"] = path
            config = config_file.from_plain(RunConfig(), settings, str(file))
            own["environment_spec"] = recorded["environment_spec"]
            own["networks_fn"] = recorded.get("networks_fn")
            content.update(recorded.get("agent_config", {}))
        except KeyError as error:
            raise RunError(f"{file} has no entry {error}; it was altered.") from error
        except ValueError as error:
            raise RunError(str(error)) from error
        return cls(agent_config=content, config=config, **own)

    @classmethod
    def find(cls, path: str | os.PathLike[str]) -> RunFolder | None:
        """As `open`; None if there is no run in the folder."""
        return cls.open(path) if (Path(path) / "config.yaml").exists() else None

    def restore(self, which: str | int | os.PathLike[str] | None = None) -> CheckpointReader:
        """Opens a checkpoint, as `Checkpointer.restore` does. Raises RunError with the run's own advice."""
        try:
            return self.checkpointer.restore(which)
        except CheckpointError as error:
            names = ", ".join(path.name for path in self.checkpointer.checkpoints())
            if names:
                raise RunError(f"{error} Choose another with --checkpoint: {names}.") from error
            pid = self.lock.pid()
            if pid not in (None, os.getpid()):
                raise RunError(
                    f"{self.path} has no checkpoint yet, and process {pid} trains in it. Wait for the first "
                    f"one, or stop the run, which writes one: repertory stop {self.quoted}"
                ) from error
            raise RunError(
                f"{self.path} has no checkpoint: its run ended before the first one (checkpoint_period, "
                f"checkpoint_minutes). {self.again}"
            ) from error

    def record(self, engine: str | None = None) -> None:
        """Writes `config.yaml` with the node's engine unless it is equal. Keeps the recorded restarts.

        If the run is interrupted from now on, it has no result, so an earlier end's goes.
        """
        (self.path / "result.json").unlink(missing_ok=True)
        new = dataclasses.replace(self, engine=engine or launch.get_node_context().engine)
        if (known := RunFolder.find(self.path)) is not None:
            new = dataclasses.replace(new, restarts=known.restarts)
            if plain(dataclasses.asdict(known)) == plain(dataclasses.asdict(new)):
                return
        new.save()

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
            config_file.write(file, plain(content))
        except OSError as error:
            raise unwritable(self.path, error, file) from error

    def check_same(self) -> None:
        """Raises RunError if the folder holds a run of another agent, environment, or other settings."""
        if (known := RunFolder.find(self.path)) is None:
            if self.checkpointer.latest() is not None:
                raise RunError(
                    f"{self.path}: got checkpoints without the config.yaml of their run. Use another folder."
                )
            return
        if known.agent != self.agent:
            raise RunError(
                f"{self.path} is a run of {known.agent!r}, not of {self.agent!r}. Use another folder."
            )
        known._check_recorded_spec(self.environment_spec)
        if known.environment != self.environment and _has_suite(known) and _has_suite(self):
            raise RunError(
                f"{self.path} is a run in {known.environment!r}, not in {self.environment!r}. Use another "
                "folder."
            )
        left_something = self.has_rows or self.checkpointer.latest() is not None
        if left_something and (changed := known.changes(self)):
            advice = f"Restore them, or give another directory, where init={str(self.path)!r} begins with "
            raise RunError(keeps_settings(self.path, changed, f"{advice}this run's parameters."))

    def check_spec(self, spec: specs.EnvironmentSpec) -> None:
        """Raises RunError if the observations or actions of an environment differ from the run's."""
        self._check_recorded_spec(recorded_specs.recorded(spec))

    def _check_recorded_spec(self, spec: Any) -> None:
        if changed := recorded_specs.changed(self.environment_spec, spec):
            raise RunError(
                f"{self.path}: the environment {self.environment!r} is not the one that the run was trained "
                f"in: {changed}. Install the version of it that config.yaml names, or start a new run."
            )

    def changes(self, new: RunFolder) -> str:
        """The `differences` that a run that continues may not have, as far as `config.yaml` can hold them."""
        old, got = (plain(dataclasses.asdict(run)) for run in (self, new))
        rows = [("networks_fn", old["networks_fn"], got["networks_fn"])]
        for part in ("config", "agent_config"):
            rows += [(name, value, got[part].get(name, value)) for name, value in old[part].items()]
        kept = [row for row in rows if row[0] not in (*MAY_CHANGE, "directory")]
        kept = [row for row in kept if _UNRECORDED not in json.dumps(row)]
        return "; ".join(filter(None, (differences({name: a}, {name: b}) for name, a, b in kept)))

    def check_limits(self, reader: CheckpointReader) -> None:
        """Raises RunError if the run has no steps left after a checkpoint."""
        counts = reader.state("counter", "counts") if "counter" in reader.names else {}
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
        ended_at = reader.manifest["note"].get("ended_at", {})
        if not isinstance(ended_at, dict) or not ended_at.keys() <= self.config.limits.keys():
            raise RunError(f"{reader.path}: manifest.json: got the limits {ended_at!r}, expected a run's.")
        changed = differences(ended_at, {name: self.config.limits[name] for name in ended_at})
        if changed:
            raise RunError(
                f"{self.path}: {changed}. A run that has ended on engine 'serial' is not extended there, "
                "because it would not be the run that had these limits from the beginning. Start a new run "
                "with them; or go on with this one, not exactly, on another engine, such as 'threads'."
            )

    def write_json(self, name: str, content: Any) -> None:
        """Writes one file of the folder. Replaces an old file atomically."""
        config_file.replace(self.path / name, json.dumps(plain(content), indent=1) + "\n")

    def with_device(self, device: str) -> RunFolder:
        """The run with its learner on `device` as a whole, as far as its agent's config has such fields."""
        places = {"device": device, "devices": {}}
        settings = {name: places.get(name, value) for name, value in self.agent_config.items()}
        return dataclasses.replace(self, agent_config=settings)

    def check_names(self, allow: Collection[str]) -> None:
        """Raises RunError if the run names code that is not registered; see `framework.runs.trust`.

        Args:
          allow: modules whose objects it may name.
        """
        with RaisedAs(RunError, ValueError, f"{self.path}: "):
            trust.check(self._names(), allow)

    def _names(self) -> dict[str, Any]:
        """The settings that may name code, without what a registered agent's own preset names."""
        names = ("agent", "environment", "networks_fn")
        own: Mapping[str, Any] = {}
        if ":" not in self.agent:
            with contextlib.suppress(ValueError):  # There is no such agent here: it is not made, either.
                own = find_preset(find_agent(self.agent).load(), self.environment)[0].agent
        given = {name: value for name, value in self.agent_config.items() if value != own.get(name)}
        each = {name: getattr(self, name) for name in names}
        return {**dataclasses.asdict(self.config), **each, "agent_config": given}

    def make_agent(self, allow: Collection[str] = ()) -> core.Agent:
        """The agent as configured in the run. A refused name is not imported.

        Args:
          allow: modules whose objects the run may name; see `check_names`.

        Raises:
          RunError: The agent cannot be found, or the run names code of other modules.
        """
        self.check_names(allow)
        with RaisedAs(RunError, (ValueError, TypeError), f"{self.path}: "):
            entry = find_agent(self.agent)
            config = entry.make_config()
            if not self.agent_config:
                return entry.make()
        self._check_recorded(self.agent_config, f"{self.agent!r}: ")
        with RaisedAs(RunError, ValueError):
            config = config_file.from_plain(config, self.agent_config, f"{self.path}/config.yaml")
        agent = entry.make(config)
        if self.networks_fn == "":
            raise RunError(
                f"{self.path}: its networks_fn was a function that cannot be imported by name. Give the "
                "agent a function of a module."
            )
        if self.networks_fn is not None:
            wrong = f"{self.path}: networks_fn {self.networks_fn!r}: "
            with RaisedAs(RunError, (ImportError, AttributeError, ValueError), wrong):
                agent.networks_fn = load_object(self.networks_fn)
        return agent

    def _check_recorded(self, values: Mapping[str, Any], where: str) -> None:
        for name, value in values.items():
            if isinstance(value, dict) and _UNRECORDED in value:
                raise RunError(
                    f"{self.path}: {where}{name} was {value[_UNRECORDED]}, which config.yaml cannot hold. "
                    "Use numbers, strings, None, and tuples or lists of them."
                )

    def environment_factory(self) -> str:
        """The argument of `environments.make`. Raises RunError if it was a factory that has no name."""
        if self.environment is None and self.config.dataset is not None:
            raise RunError(f"{self.path}: it learned from a dataset without an environment to play in.")
        if self.environment is None:
            raise RunError(
                f"{self.path}: its environment was a function that cannot be imported by name. Give "
                "make_program the environment's name, or a function of a module."
            )
        self._check_recorded(self.config.environment_options, "environment_options: ")
        self._check_recorded(self.config.evaluation_options, "evaluation_options: ")
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
    def continuing(self) -> Iterator[IO[str]]:
        """As `RunLock.held`, if the run is new or has steps left."""
        with self.lock.held() as file:
            reader = self.checkpointer.newest_intact()
            if reader is not None:
                self.check_limits(reader)
            yield file


def differences(expected: Mapping[str, Any], got: Mapping[str, Any]) -> str:
    """Which settings differ, as in `learning_rate: got 0.01, expected 0.001`; empty if none does."""
    names = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
    return "; ".join(f"{name}: got {got.get(name)!r}, expected {expected.get(name)!r}" for name in names)


def keeps_settings(path: Path, changed: str, advice: str) -> str:
    """The error for a run in `path` that is to continue with the `differences` in `changed`."""
    may = f"{', '.join(MAY_CHANGE)}, engine, and restarts"
    return f"{path}: {changed}. A run that continues keeps its settings, except for {may}. {advice}"


def changed_settings(directory: str | os.PathLike[str], agent: core.Agent) -> str:
    """Which settings of `agent` differ from the run's in `directory`; empty if none does."""
    _, fields = describe_agent(agent)
    return differences(RunFolder.open(directory).agent_config, plain(fields))


def _has_suite(run: RunFolder) -> bool:
    """Whether the name of the environment says which it is. A function or an address may be another now."""
    name = run.environment or ""
    return name.partition(":")[0] in known_suites() and "://" not in name


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: tuples as lists, and what it cannot hold by name."""
    return json.loads(json.dumps(config_checks.plain(Any, value), default=_unrecorded))


def _unrecorded(value: Any) -> dict[str, str]:
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")  # The text would depend on print options.
    return {_UNRECORDED: f"{type(value).__name__} {value.dtype}{[*value.shape]}" if is_array else repr(value)}


def git_commits() -> dict[str, str]:
    """The git commits of Repertory and of the working folder, with `-dirty` after uncommitted changes."""
    commits = {}
    package = Path(sys.modules["framework"].__path__[0])
    for name, folder in (("repertory", package), ("working_folder", Path.cwd())):
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
