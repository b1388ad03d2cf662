"""`repertory train`: runs an agent's program in a run folder, new or resumed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tree

from framework import config_checks, core, interrupts
from framework.commands import building
from framework.commands.options import (
    CommandError,
    ResumeOptions,
    TrainOptions,
    UsageError,
    parse_groups,
)
from framework.commands.running import exit_code, writing
from framework.experiments import running
from framework.experiments.settings import with_ten_evaluations
from framework.runs import config_file, trust
from framework.runs.presets import DEFAULTS, OF_DATASETS, find_preset, presets_of
from framework.runs.registry import AgentEntry, NoConfig, agent_names, find_agent
from framework.runs.run_config import RunConfig
from framework.runs.run_folder import RunError, RunFolder, keeps_settings
from launch.texts import printable

_NOT_IN_FILES = ("config", "allow", "preset")  # A file has values, and does not say what it may name.


def main(arguments: Sequence[str]) -> int:
    arguments = list(arguments)
    name = arguments[0] if arguments and not arguments[0].startswith("-") else None
    flags = {argument.split("=")[0] for argument in arguments}
    if "--resume" in flags:
        return resume(arguments if name is None else arguments[1:], name)
    if name is None and "--config" not in flags and {"-h", "--help"} & flags:
        print(
            "usage: repertory train AGENT [flags]\n       repertory train --config FILE [flags]\n"
            "       repertory train --resume RUN [flags]\n\n"
            f"agents: {', '.join(agent_names())}\n\n"
            "`repertory train AGENT --help` shows the flags of a run and of the agent."
        )
        return 0
    return start(name, arguments if name is None else arguments[1:])


def start(name: str | None, arguments: Sequence[str]) -> int:
    """Trains the agent `name`, or the agent in the file of `--config`, in a new folder."""
    entry, options, config, agent_config = parse_new(name, arguments)
    agent = entry.make(agent_config)
    _, origin = find_preset(entry.load(), options.preset or options.environment)
    origin = "" if options.config is not None else origin
    interrupts.clean_up_first()
    if config.directory is not None:
        return _start(agent, options, config, origin)
    path = running.new_folder(entry.name, options.environment or "dataset", config.seed)
    with running.removed_if_empty(path), config_checks.RaisedAs(UsageError, ValueError):
        return _start(agent, options, dataclasses.replace(config, directory=str(path)), origin)


def _start(agent: core.Agent, options: TrainOptions, config: RunConfig, origin: str) -> int:
    path = Path(str(config.directory))
    config = config.decided({})
    with config_checks.RaisedAs(UsageError, ValueError, building.NOT_BUILT):
        agent, lines = agent.decided(config, {})
    spec = building.environment_spec(agent, options.environment, config)
    building.check_agent(agent, spec)
    folder = RunFolder.describe(agent, options.environment, config, spec)
    folder = dataclasses.replace(folder, engine=options.engine, restarts=options.restarts)
    if (path / "config.yaml").exists():
        raise CommandError(f"{path} holds a run already. {_advice(folder)} another folder with --directory.")
    program = building.build_program(agent, options.environment, config, options.engine)
    # What fails before this leaves no folder.
    with writing(folder):
        told = (*filter(None, [origin]), *lines, *agent.describe_inputs(spec))
        return exit_code(folder, lambda: running.begin(folder, program, told))


def parse_new(
    name: str | None, arguments: Sequence[str], command: str = "train", *more: Any
) -> tuple[Any, ...]:
    """Returns the agent's `AgentEntry`, the `TrainOptions`, the `RunConfig`, the agent's config, and `more`.

    `more` are dataclasses whose fields are flags of the command, too. Flags override the file of `--config`,
    which overrides the preset, which overrides the defaults.
    """
    # The file says which agent, the environment which preset, and both give the defaults of the other flags.
    early, _ = _early(arguments, "--config", "--environment", "--dataset", "--preset")
    given = _read(early.config)
    in_file = {key: value for key, value in given.items() if key != "environment" or not early.environment}
    with config_checks.RaisedAs(UsageError, ValueError, f"{early.config}: "):
        trust.check(in_file, [*early.allow, *trust.module_in(name)])
    dataset = early.dataset or given.get("dataset")
    if given.get("environment", "") is None and dataset is None:  # The run's was a function without a name.
        if early.environment is None:
            raise UsageError(
                f"{early.config}: environment: got null, expected SUITE:NAME or module:function. Give "
                "it with --environment."
            )
        del given["environment"]
    entry = find(_agent_name(name, given.pop("agent", None), early.config))
    environment = early.environment or given.pop("environment", None)
    if environment is None and dataset is None:
        environment = default_environment(entry)
    preset, line = find_preset(entry.load(), early.preset or environment)
    if early.preset is not None and line:
        known = presets_of(entry.load())
        near = config_checks.nearest(early.preset, known)
        raise UsageError(f"--preset: got {early.preset!r}, expected one of {', '.join(known)}.{near}")
    run_settings = {**DEFAULTS, **preset.run}
    if dataset is not None:
        run_settings |= {**OF_DATASETS, **({"evaluate_period": None} if environment is None else {})}
    agent_config = entry.make_config()
    with config_checks.RaisedAs(UsageError, ValueError):
        train_options = TrainOptions(environment=environment)
    parts: list[tuple[Any, Mapping[str, Any]]] = [
        (train_options, {}),
        (RunConfig(), run_settings),
        (agent_config, {} if agent_config == NoConfig() else preset.agent),
    ]
    names = [[field.name for field in dataclasses.fields(base)] for base, _ in parts]
    for name in _hidden(agent_config):
        raise UsageError(
            f"{type(agent_config).__name__}: got the field {name!r}, which is a setting of every run, "
            "expected another name. Rename the field."
        )
    where, made = str(early.config), []
    with config_checks.RaisedAs(UsageError, ValueError):
        config_checks.names(
            where, given, [name for own in names for name in own if name not in _NOT_IN_FILES]
        )
        for (base, values), own in zip(parts, names, strict=True):
            in_file = {name: given[name] for name in own if name in given}
            made.append(config_file.from_plain(base, {**values, **in_file}, where))
    prog, description = f"repertory {command} {entry.name}", f"{entry.summary()}."
    options, config, *others = parse_groups([*made, *more], arguments, prog, description)
    flags = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if "evaluate_period" not in given and "--evaluate-period" not in flags:
        config = with_ten_evaluations(config, preset)
    return entry, options, config, *others


def _early(arguments: Sequence[str], *flags: str) -> tuple[argparse.Namespace, list[str]]:
    """The values of `flags` and of `--allow`, which say what the other flags are; and those others."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in flags:
        parser.add_argument(flag, nargs="?")
    parser.add_argument("--allow", action="append", default=[])
    return parser.parse_known_args(arguments)


def _hidden(agent_config: Any) -> list[str]:
    """The fields of an agent's config that have the name of a setting of every run."""
    others = {field.name for base in (TrainOptions, RunConfig) for field in dataclasses.fields(base)}
    return [field.name for field in dataclasses.fields(agent_config) if field.name in others]


def _read(path: str | None) -> dict[str, Any]:
    """Returns the settings in the file of `--config`."""
    if path is None:
        return {}
    try:
        with config_checks.RaisedAs(UsageError, ValueError):
            given = config_file.read(path)
    except OSError as error:
        raise CommandError(f"--config {path}: {error.strerror}.") from error
    given.pop(config_file.RECORDED, None)
    for name, value in given.items():
        for text in (name, *tree.flatten(value)):  # The help shows them.
            if isinstance(text, str) and printable(text) != text:
                raise UsageError(f"{path}: {name!r}: got {text!r}, expected text without control characters.")
    return given


def _agent_name(name: str | None, in_file: str | None, path: str | None) -> str:
    if name is None and in_file is None:
        raise UsageError(
            f"train: which agent? repertory train AGENT, one of {', '.join(agent_names())}, or "
            "module:object; or repertory train --config FILE; or repertory train --resume RUN."
        )
    if name is not None and in_file is not None and find(name) != find(in_file):
        raise UsageError(f"{path} is for the agent {in_file!r}, not for {name!r}. Leave one of them out.")
    return name or str(in_file)


def default_environment(entry: AgentEntry) -> str:
    """Returns CartPole, or the environment of the agent's first preset if there is none for CartPole."""
    known = [name for name in presets_of(entry.load()) if "*" not in name and ":" in name]
    usual = str(TrainOptions.environment)
    return known[0] if known and usual not in known else usual


def find(name: str) -> AgentEntry:
    """Returns the agent of a command line; raises `UsageError` if there is none."""
    with config_checks.RaisedAs(UsageError, (ValueError, TypeError)):
        entry = find_agent(name)
        entry.make()
        return entry


def resume(arguments: Sequence[str], name: str | None = None) -> int:
    """Resumes a run from its checkpoint, with its settings, and perhaps other limits and devices."""
    early, others = _early(arguments, "--resume", "--checkpoint", "--directory")
    if early.resume is None:
        raise UsageError("--resume: got no folder, expected a run's: repertory train --resume RUN")
    folder = RunFolder.open(early.resume)
    if name is not None and find(name).name != folder.agent:
        raise UsageError(f"{folder.path} is a run of {folder.agent!r}, not of {name!r}; leave the agent out.")
    agent = folder.make_agent(early.allow)
    environment = folder.environment if folder.config.dataset else folder.environment_factory()
    # Fields with the names of other settings have no flags.
    own = getattr(agent, "config", None)
    own = own if folder.agent_config and not _hidden(own) else NoConfig()
    options = TrainOptions(None, environment, engine=folder.engine, restarts=folder.restarts)
    options, config, agent_config, given = parse_groups(
        (options, folder.config, own, ResumeOptions(early.resume)),
        arguments,
        prog="repertory train",
        description="Resumes a run with its settings except limits, devices, step_mode, engine and restarts.",
    )
    fixed = {"config": None, "environment": environment, "preset": None, "directory": folder.config.directory}
    for flag, value in fixed.items():
        if (got := getattr(config if flag == "directory" else options, flag)) != value:
            raise UsageError(
                f"--{flag}: got {got!r}, expected {value!r}, with which {folder.path} was trained. Leave "
                f"--{flag} out, or start a new run."
            )
    new = dataclasses.replace(
        folder,
        config=config,
        agent_config={**folder.agent_config, **vars(agent_config)},
        engine=options.engine,
        restarts=options.restarts,
    )
    if changed := folder.changes(new):
        begin = ["--config", f"{folder.path}/config.yaml", "--init", str(folder.path)]
        begin += [f"--allow={module}" for module in early.allow]
        command = shlex.join(["repertory", "train", *begin, *others])
        advice = f"Leave the others out, or start a new run with them from these parameters: {command}"
        raise UsageError(keeps_settings(folder.path, changed, advice))
    folder = new
    agent = folder.make_agent(early.allow)
    program = building.build_program(agent, environment, folder.config, folder.engine)
    interrupts.clean_up_first()
    with writing(folder), folder.lock.held() as lock, chosen_checkpoint(folder, given.checkpoint):
        folder.save()
        (folder.path / "result.json").unlink(missing_ok=True)  # If this run is interrupted, it has no result.
        return exit_code(folder, lambda: running.run(folder, program, lock))


def _advice(folder: RunFolder) -> str:
    """What to do with a folder that holds a run, before "another folder"."""
    pid = folder.lock.pid()
    if pid is not None:
        return f"Process {pid} trains in it. Give"
    if folder.checkpointer.latest() is not None:
        return f"Go on with it: repertory train --resume {folder.allowed}; or give"
    return "It ended before its first checkpoint, so that it cannot go on. Remove the folder, or give"


@contextlib.contextmanager
def chosen_checkpoint(folder: RunFolder, which: str) -> Iterator[None]:
    """Makes `which` the newest checkpoint of the run by renaming later ones; refuses a damaged one.

    If the block fails before it has saved a checkpoint, they get their names back, and the run its settings
    and its result.
    """
    reader = folder.restore(which)
    folder.check_limits(reader)
    if folder.engine == "serial":
        with config_checks.RaisedAs(UsageError, RunError):
            folder.check_exact(reader)
    checkpointer = folder.checkpointer
    paths = checkpointer.checkpoints()
    same = [path for path in paths if path.samefile(reader.path)]
    if not same:
        raise CommandError(
            f"--checkpoint {which}: got a checkpoint that is not one of {folder.path}, expected latest, "
            f"previous, a step, or one of: {', '.join(path.name for path in paths) or 'none'}."
        )
    aside: dict[Path, Path] = {}
    files = [folder.path / name for name in ("config.yaml", "result.json")]
    before = {file: file.read_text(encoding="utf-8") for file in files if file.exists()}
    try:
        for newer in paths[paths.index(same[0]) + 1 :]:
            aside[newer] = newer.rename(_aside(newer))
            print(f"Set aside {newer.name}; going on from {reader.path.name}.", file=sys.stderr)
        yield
    except BaseException:
        if checkpointer.checkpoints() == [path for path in paths if path not in aside]:  # None was saved.
            for name, path in aside.items():
                path.rename(name)
            for file, text in before.items():
                config_file.replace(file, text)
        raise


def _aside(path: Path) -> Path:
    """Returns a free name for a checkpoint that is set aside, which may have happened before."""
    names = (f"set-aside-{path.name}{f'-{n}' if n > 1 else ''}" for n in itertools.count(1))
    return next(free for name in names if not (free := path.with_name(name)).exists())
