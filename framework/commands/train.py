"""`repertory train`: runs an agent's program in a run folder, new or resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import launch
from framework.checkpoints import Checkpointer, CheckpointError
from framework.commands import building
from framework.commands.options import CommandError, TrainOptions, UsageError, parse, parse_train
from framework.commands.plot import draw_run
from framework.loggers import ProgressDisplay
from framework.loggers.files import explained
from framework.programs.presets import Preset, presets_of
from framework.programs.registry import AgentEntry, agent_names, find_agent
from framework.programs.run_config import RunConfig
from framework.programs.run_folder import RunFolder
from launch.view import NodesView

_POLL_S = 0.5  # seconds between two updates of the display


@dataclasses.dataclass(frozen=True)
class ResumeOptions:
    """Resumes a run from its checkpoint. Settings without a flag stay as they were."""

    resume: str  # Folder of the run.
    checkpoint: str = "latest"  # "latest", "previous", or a step; newer ones are then set aside.
    engine: str | None = None  # Engine of the program.
    restarts: int | None = None  # How often each node may fail and be restarted.
    max_env_steps: int | None = None  # New limit of env steps, counted from the start of the run.
    target_return: float | None = None  # New target return.
    environment: str | None = None  # Only checked: a run keeps its environment.


def main(arguments: Sequence[str]) -> int:
    arguments = list(arguments)
    name = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if any(argument.split("=")[0] == "--resume" for argument in arguments):
        return resume(arguments if name is None else arguments[1:], name)
    if name is None:
        if any(argument in ("-h", "--help") for argument in arguments):
            print(
                "usage: repertory train AGENT [flags]\n       repertory train --resume RUN [flags]\n\n"
                f"agents: {', '.join(agent_names())}\n\n"
                "`repertory train AGENT --help` shows the flags of a run and of the agent,\n"
                "`repertory train --resume RUN --help` those of a resumed run."
            )
            return 0
        raise UsageError(
            f"train: which agent? repertory train AGENT, one of {', '.join(agent_names())}, or "
            "module:Class; or repertory train --resume RUN."
        )
    return start(name, arguments[1:])


def start(name: str, arguments: Sequence[str]) -> int:
    """Trains the agent `name` in a new folder."""
    entry, options, config, agent_config = parse_new(name, arguments)
    building.check_installed(options.engine, config)
    make_agent: Any = entry.load()
    agent = make_agent(agent_config)
    path = Path(config.directory or _default_path(entry.name, options.environment, config.seed))
    config = dataclasses.replace(config, directory=str(path))
    spec = building.environment_spec(agent, options.environment, config)
    building.check_agent(agent, spec)
    _check_new(path)
    program = building.build_program(
        agent, options.environment, config
    )  # may fail, so it comes before the folder is created
    folder = RunFolder.describe(agent, options.environment, config, spec)
    folder = dataclasses.replace(folder, engine=options.engine, restarts=options.restarts)
    folder.save()
    return run(folder, program)


def parse_new(name: str, arguments: Sequence[str]) -> tuple[AgentEntry, TrainOptions, RunConfig, Any]:
    """Returns the agent's entry, the options, the run's config and the agent's; presets give defaults."""
    entry = find(name)
    preset = presets_of(entry.load()).get(_environment_of(arguments), Preset())
    parsed = parse_train(
        entry.make_config(**preset.agent),
        dict(preset.run),
        arguments,
        prog=f"repertory train {entry.name}",
        description=f"{entry.summary()}.",
    )
    return entry, *parsed


def find(name: str) -> AgentEntry:
    """Returns the agent of a command line; raises `UsageError` if there is none."""
    try:
        entry = find_agent(name)
        entry.load()
    except ValueError as error:
        raise UsageError(str(error)) from error
    return entry


def resume(arguments: Sequence[str], name: str | None = None) -> int:
    """Resumes a run."""
    given = parse(ResumeOptions, arguments, prog="repertory train")
    folder = RunFolder.open(given.resume)
    if name is not None and find(name).name != folder.agent:
        raise UsageError(f"{folder.path} is a run of {folder.agent!r}, not of {name!r}; leave the agent out.")
    if given.environment is not None and given.environment != folder.environment:
        raise UsageError(
            f"{folder.path} was trained in {folder.environment!r} and cannot go on in "
            f"{given.environment!r}. Leave --environment out, or start a new run there."
        )
    config = dataclasses.replace(folder.config, **_given(given, "max_env_steps", "target_return"))
    folder = dataclasses.replace(folder, config=config, **_given(given, "engine", "restarts"))
    building.check_installed(folder.engine, config)
    program = building.build_program(folder.make_agent(), folder.environment_factory(), config)
    with _writing(folder.path), chosen_checkpoint(folder, given.checkpoint):
        folder.save()
        return run(folder, program)


def _check_new(path: Path) -> None:
    """Raises `CommandError` if the folder holds a run."""
    if not (path / "config.json").exists():
        return
    if Checkpointer(path / "checkpoints").checkpoints():
        advice = f"Go on with it: repertory train --resume {path}; or give"
    else:
        advice = "It ended before its first checkpoint, so that it cannot go on. Remove it, or give"
    raise CommandError(f"{path} holds a run already. {advice} another folder with --directory.")


def _default_path(agent: str, environment: str, seed: int) -> Path:
    """Returns the name of a new folder, such as `runs/dqn-CartPole-v1-seed1-20260131-120000`."""
    place = environment.partition(":")[2].replace("/", "-").replace(":", "-")
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{agent.rpartition(':')[2]}-{place}-seed{seed}-{now}"


def _given(options: ResumeOptions, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name)) is not None}


@contextlib.contextmanager
def chosen_checkpoint(folder: RunFolder, which: str) -> Iterator[None]:
    """Makes `which` the newest checkpoint of the run by renaming later ones; refuses a damaged one.

    They get their names back if the block fails before it has saved a checkpoint.
    """
    checkpointer = folder.checkpointer
    try:
        reader = checkpointer.restore(None if which == "latest" else which)
    except CheckpointError as error:
        advice = (
            f" Choose another with --checkpoint: {', '.join(p.name for p in checkpointer.checkpoints())}."
        )
        raise CommandError(f"{error}{advice if checkpointer.checkpoints() else ''}") from error
    limit = folder.config.max_env_steps
    # A run without a result was interrupted in its last evaluation, which it repeats now.
    if limit is not None and reader.step >= limit and (folder.path / "result.json").exists():
        raise CommandError(
            f"{folder.path} has made {reader.step:,} env steps, and its limit is {limit:,}. Give it more: "
            f"--max-env-steps {2 * reader.step}"
        )
    paths = checkpointer.checkpoints()
    aside = {}
    for newer in paths[paths.index(reader.path) + 1 :] if reader.path in paths else ():
        aside[newer] = newer.rename(newer.with_name(f"set-aside-{newer.name}"))
        print(f"Set aside {newer.name}; going on from {reader.path.name}.", file=sys.stderr)
    try:
        yield
    except BaseException:
        if checkpointer.latest() == reader.path:
            for name, path in aside.items():
                path.rename(name)
        raise


def run(folder: RunFolder, program: launch.Program) -> int:
    """Runs the program of `folder` to its end and reports it; returns the exit code."""
    print(f"{folder.agent} in {folder.environment_name}, engine {folder.engine}, folder {folder.path}")
    with _writing(folder.path), folder.locked():
        try:
            result, stopped_by = _run(program, folder)
        except launch.LaunchError as error:
            raise CommandError(_explain(error, folder.path)) from error
        return _report(folder, result, stopped_by)


def _run(program: launch.Program, folder: RunFolder) -> tuple[Any, int | None]:
    """Returns the result, and the signal that ended the run or None."""
    restarts = dict.fromkeys(program.groups, folder.restarts) if folder.restarts else None
    with (
        launch.start(program, folder.engine, directory=folder.path, restarts=restarts) as job,
        _stopping(job) as received,
        ProgressDisplay(
            folder.config.max_env_steps, folder.config.target_return, below=NodesView(job.status)
        ) as display,
    ):
        try:
            while not job.over:
                try:
                    job.wait(timeout=_POLL_S)
                except TimeoutError:
                    if job.over:
                        raise
                    display.update(None if received else _snapshot(job))
        finally:
            display.update(None)  # shows how the nodes ended
        return job.result, (received[0] if received else None)


def _snapshot(job: Any) -> Any:
    """Returns the monitor's newest numbers; None while the program starts or ends."""
    try:
        return job.client("monitor").with_timeout(5.0).snapshot()
    except (launch.LaunchError, ValueError):  # ValueError: its sockets are closed; wait() raises its error
        return None


@contextlib.contextmanager
def _stopping(job: Any) -> Iterator[list[int]]:
    """Makes the first signal stop the job cleanly and a second one kill it; the list holds both."""
    received: list[int] = []

    def handler(number: int, frame: Any) -> None:
        received.append(number)
        # On a separate thread, because the interrupted code may hold a lock that the stop needs.
        threading.Thread(target=job.stop if len(received) == 1 else job.kill, daemon=True).start()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _report(folder: RunFolder, result: Any, stopped_by: int | None) -> int:
    draw_run(folder)
    if stopped_by is not None:
        latest = folder.checkpointer.latest()
        where = f"at {latest.name}" if latest else "before the first checkpoint"
        print(f"Stopped by {signal.Signals(stopped_by).name} {where}.")
        if latest:
            print(f"Go on with: repertory train --resume {folder.path}")
        return 128 + stopped_by
    result = dict(result or {})
    folder.write_json("result.json", result)
    print(describe_result(result, folder.config))
    best = "" if result.get("episode_return") is None else " --checkpoint best"
    print(f"Results are in {folder.path}. Look at them: repertory eval {folder.path}{best}")
    return 0


def describe_result(result: dict[str, Any], config: RunConfig) -> str:
    """Returns a sentence on why the run ended and what it reached."""
    steps = result.get("env_steps")
    after = f" after {steps:,} env steps" if steps is not None else ""
    reached = result.get("episode_return")
    mean = (
        "" if reached is None else f"greedy mean return over {result.get('episodes')} episodes: {reached:.1f}"
    )
    reason = result.get("reason")
    if reason == "target_return":
        return f"Reached the target return of {config.target_return:g}{after}; {mean}."
    if reason == "max_env_steps":
        short = ""
        if config.target_return is not None and (reached is None or reached < config.target_return):
            short = f" The target return of {config.target_return:g} was not reached."
        spent = f"The budget of {config.max_env_steps:,} env steps is spent"
        return f"{spent}{mean and '; '}{mean}.{short}"
    if reason == "max_learner_steps":
        return f"The budget of {config.max_learner_steps:,} learner steps is spent{after}."
    return f"The program ended{after}{f' ({reason})' if reason else ''}."


def _explain(error: Exception, path: Path) -> str:
    cause = error.__cause__
    node = getattr(error, "node", None)
    if isinstance(cause, CheckpointError):
        return str(cause)  # names the file; the node that asked for the checkpoint did not fail
    if node is not None and isinstance(cause, OSError):
        return f"node {node!r}: {cause.strerror or cause}"  # an error of the disk
    reason, _, traceback = str(error).partition("\n\n")
    if traceback:
        print(traceback, file=sys.stderr)  # first, so that the reason is at the bottom of the screen
    logs = f"; logs of its nodes are in {path / 'logs'}" if (path / "logs").is_dir() else ""
    return f"{reason}\nThe run ended in {path}{logs}."


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turns errors in writing the run's files into one clear error."""
    try:
        yield
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        if error.errno is None:
            raise
        told = error if str(error.strerror).startswith("could not") else explained(error, path)
        raise CommandError(str(told.strerror)) from error


def _environment_of(arguments: Sequence[str]) -> str:
    """Returns the value of `--environment` before the other flags are parsed."""
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag == "--environment":
            return value if equals else "".join(arguments[index + 1 : index + 2])
    return TrainOptions().environment
