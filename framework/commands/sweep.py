"""`repertory sweep`: many runs, in slots of this machine or as jobs of Slurm; see `framework.experiments`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import resource
import shlex
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from framework import config_checks, interrupts
from framework.commands import building, evaluate, sweep_report, train
from framework.commands.options import Allow, CommandError, UsageError, parse, parse_groups
from framework.experiments.executors import PARENT, LocalRun, SlurmRun
from framework.experiments.queue import RunQueue, Trial
from framework.experiments.search import Search
from framework.experiments.slots import Slot, make_slots
from framework.experiments.sweep import Sweep, SweepFolder
from framework.runs import config_file, trust
from framework.runs.checkpoints import PROGRAM
from framework.runs.run_folder import RunFolder
from framework.runs.run_lock import RunError, RunLock
from launch import platforms
from launch.running import stopped_by_signals

_LOOK_S = 1.0  # Seconds between two updates of the table.
_STOP_S = 900.0  # Seconds for the last checkpoints of all runs.
Folder = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="SWEEP")]]


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """Runs agents in environments with several settings and seeds, as many at a time as there are slots.

    repertory sweep ppo dqn --environment gymnasium:CartPole-v1 gymnasium:Acrobot-v1 --seeds 5
      --set learning_rate=1e-3,3e-4 max_env_steps=50_000 --slots 2

    repertory sweep FILE.yaml: the same from a file, whose keys are agents, environments, seeds, set, search,
      slots, executor, slurm, directory, optuna, objective, final_seed, final_episodes. Flags override them.

    repertory sweep SWEEP: goes on with a sweep that was stopped or killed. So does the same command again.

    repertory sweep status SWEEP, repertory sweep stop SWEEP: shows it; stops its runs with a checkpoint.
    """

    retry_failed: bool = False  # Also repeat the runs that have failed.
    allow: Allow = ()  # A module whose objects the file may name. Give it once for each module.


@dataclasses.dataclass(frozen=True)
class FolderOptions:
    """Shows the runs of a sweep, or stops a sweep; its runs save checkpoints first."""

    sweep: Folder  # Folder of the sweep.


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Begins one run of a sweep, or goes on with it, as a slot does."""

    sweep: Folder  # Folder of the sweep.
    name: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="NAME")]]  # The run.
    allow: Allow = ()  # A module whose objects the run may name. Give it once for each module.


def main(arguments: Sequence[str]) -> int:
    others = {"status": status, "stop": stop, "run": run}
    if arguments and arguments[0] in others:
        return others[arguments[0]](arguments[1:])
    with config_checks.RaisedAs(UsageError, (ValueError, TypeError)):
        sweep, again, allow = read(arguments)
    check(sweep, allow)
    folder = SweepFolder(sweep.place, sweep)
    if (pid := folder.lock.pid()) is not None:
        raise CommandError(
            f"{folder.path} is being swept by process {pid}. Stop it first, with repertory sweep stop "
            f"{shlex.quote(str(folder.path))}; or give another --directory."
        )
    interrupts.clean_up_first()
    with folder.lock.held():
        folder.save()
        return _sweep(folder, again, [f"--allow={module}" for module in allow])


def _sweep(folder: SweepFolder, again: bool, flags: Sequence[str]) -> int:
    """Runs the rest of a sweep, and reports its results; returns the exit code."""
    sweep, command = folder.sweep, shlex.join(["repertory", "sweep", str(folder.path), *flags])
    search = Search(folder) if sweep.optuna is not None else None
    variants = [] if search else [variant for group in sweep.groups() for variant in group]
    folder.add(variants)

    def execute(name: str, slot: Slot) -> LocalRun | SlurmRun:
        arguments = ["sweep", "run", str(folder.path), name, *flags]
        if sweep.executor == "slurm":
            return SlurmRun(folder, name, arguments)
        return LocalRun(folder, name, arguments, slot)

    slots = [Slot((), ())] * sweep.slots if sweep.executor == "slurm" else make_slots(sweep.slots)
    display = sweep_report.Display(folder, [variant.name for variant in variants])
    trials = search.trials() if search else (Trial([variant]) for variant in variants)
    queue: Any = RunQueue(folder, trials, slots, execute, again, display.tell)
    with stopped_by_signals(queue) as received, display, queue:
        while not queue.wait(_LOOK_S):
            display.update(queue.running())
    if received:
        print(f"Stopped by {signal.Signals(received[0]).name}. Go on with: {command}")
        return 128 + received[0]
    variants = search.variants() if search else variants
    sweep_report.report(folder, variants)
    for line in search.best() if search else ():
        print(line)
    states = {variant.name: folder.state(variant.name) for variant in variants}
    # Other seeds of a trial that was pruned, or has failed, do not run.
    unfinished = [name for name, state in states.items() if state in ("failed", "stopped")]
    for name in unfinished:
        print(f"{name} {states[name]}. {folder.states[name].get('error', '')} Its log: {folder.log(name)}")
    if unfinished:
        print(f"Repeat them: {command} --retry-failed")
    return 1 if unfinished else 0


def read(arguments: Sequence[str]) -> tuple[Sweep, bool, list[str]]:
    """The sweep of a command line; whether failed runs are repeated; modules whose objects it may name."""
    count = next((i for i, each in enumerate(arguments) if each.startswith("-")), len(arguments))
    what, flags = arguments[:count], arguments[count:]
    file = Path(what[0], "sweep.yaml") if what and Path(what[0], "sweep.yaml").exists() else Path(*what[:1])
    if not what and not {"-h", "--help"} & {*flags}:
        raise UsageError("sweep: got no agents, expected repertory sweep AGENT [AGENT ...], FILE or SWEEP.")
    given: dict[str, Any] = {"agents": tuple(what)}
    if is_file := len(what) == 1 and file.suffix in (".yaml", ".yml"):
        try:
            given = config_file.read(file)
        except OSError as error:
            raise CommandError(f"{file}: {error.strerror}.") from error
        config_checks.names(str(file), given, [field.name for field in dataclasses.fields(Sweep)])
        is_own = file.name == "sweep.yaml" and (file.parent / "variants").is_dir()
        place = file.parent if is_own else Path("sweeps", file.stem)
        given["directory"] = given.get("directory") or str(place)
    flags = [re.sub(r"^--environment(?=$|=)", "--environments", flag) for flag in flags]
    hint = " Settings of the runs go into --set NAME=VALUE."
    with config_checks.RaisedAs(UsageError, UsageError, after=hint):
        both, about = [Sweep(**given), SweepOptions()], str(SweepOptions.__doc__)
        sweep, options = parse_groups(both, flags, "repertory sweep", about)
    if not sweep.environments:
        found = {train.default_environment(train.find(agent)) for agent in sweep.agents}
        sweep = dataclasses.replace(sweep, environments=tuple(found) if len(found) == 1 else ())
    sweep.check()
    allow = list(options.allow)
    for variant in [group[0] for group in sweep.groups()] if not is_file else []:
        allow += [module for *_, module in trust.named(variant.content())]
    return sweep, options.retry_failed, list(dict.fromkeys(allow))


def check(sweep: Sweep, allow: Sequence[str]) -> None:
    """Raises `CommandError` for what `repertory train` would refuse in one of the runs."""
    flags, known = [f"--allow={module}" for module in allow], set()
    ends = {tuple((name, of[end]) for name, of in sweep.search.items()) for end in ("low", "high")}
    with tempfile.TemporaryDirectory() as place:
        for group, end in itertools.product(sweep.groups(), ends):
            pair = agent, environment = group[0].agent, group[0].environment
            variant = sweep.variants(agent, environment, {**group[0].settings, **dict(end)})[0]
            config_file.write(file := Path(place, f"{variant.name}.yaml"), variant.content())
            try:
                entry, options, config, agent_config = train.parse_new(None, ["--config", str(file), *flags])
                if pair not in known:
                    building.environment_spec(entry.make(agent_config), options.environment, config)
                known.add(pair)
            except RunError as error:
                text = str(error).replace(f"{place}/", "the run ").replace(".yaml", "")
                raise UsageError(text) from error


def status(arguments: Sequence[str]) -> int:
    folder = SweepFolder(parse(FolderOptions, arguments, prog="repertory sweep status").sweep)
    print(sweep_report.status(folder))
    return 0


def stop(arguments: Sequence[str]) -> int:
    folder = SweepFolder(parse(FolderOptions, arguments, prog="repertory sweep stop").sweep)
    if folder.lock.pid() is None:
        raise CommandError(f"{folder.path} is not running.")
    folder.lock.ask_to_stop()
    if not folder.lock.wait_until_free(_STOP_S):
        raise CommandError(f"{folder.path}: its runs have not ended after {_STOP_S:g} seconds. Stop again.")
    print(f"{folder.path} has stopped. Go on with: repertory sweep {shlex.quote(str(folder.path))}")
    return 0


def run(arguments: Sequence[str]) -> int:
    """Begins a run, or goes on with it, and plays its last evaluation."""
    if (parent := os.environ.pop(PARENT, None)) is not None:
        platforms.end_with_parent(signal.SIGTERM)
        if os.getppid() != int(parent):  # It has died meanwhile.
            return 128 + signal.SIGTERM
    options = parse(RunOptions, arguments, prog="repertory sweep run")
    folder, name = SweepFolder(options.sweep), options.name
    path, flags, code = folder.run(name), [f"--allow={module}" for module in options.allow], 0
    if name not in folder.names():
        raise UsageError(f"{folder.path} has no run {name!r}.{config_checks.nearest(name, folder.names())}")
    if (path / "run.lock").exists():
        RunLock(path).wait_until_free(None)  # The run of a sweep that was killed saves its checkpoint.
    if not (path / "result.json").exists():
        command = ["--resume", str(path)]
        if not _goes_on(RunFolder.find(path)):
            shutil.rmtree(path, ignore_errors=True)
            command = ["--config", str(folder.file(name)), "--directory", str(path)]
        try:
            code = train.main([*command, *flags])
        finally:
            used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
            with contextlib.suppress(FileNotFoundError), open(path / "cpu_seconds.txt", "a") as file:
                file.write(f"{sum(each.ru_utime + each.ru_stime for each in used):.3f}\n")
    if code == 0 and folder.outcome(name) is None and (final := folder.sweep.final) is not None:
        code = evaluate.main([str(path), "--seed", str(final[0]), "--episodes", str(final[1]), *flags])
    return code


def _goes_on(found: RunFolder | None) -> bool:
    """Whether a run can go on. On `serial`, whose runs are exact, one that was killed begins again."""
    reader = None if found is None else found.checkpointer.newest_intact()
    return reader is not None and (found.engine != "serial" or PROGRAM in reader.names)  # type: ignore[union-attr]
