"""Flags from dataclasses, with tyro: each field is a flag, and the comment after it is its help."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import tyro
import yaml
from tyro import constructors

from framework import config_checks
from framework.runs import config_file
from framework.runs.run_folder import RunError
from launch.texts import integer

T = TypeVar("T")
Run = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
# Modules that the settings of a run, or of a file, may name; registered agents and environments need none.
Allow = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="MODULE")]
Checkpoint = Annotated[str | None, tyro.conf.arg(metavar="best|latest|previous|STEP")]


class CommandError(RunError):
    """An error of a command, which the command line prints without a traceback."""


class UsageError(CommandError):
    """An invalid command line."""


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """The environment and the engine of `repertory train`."""

    # YAML: names of flags and their values, such as the config.yaml of a run. Flags override it.
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    # `repertory list` shows examples of all suites.
    environment: Annotated[str | None, tyro.conf.arg(metavar="SUITE:NAME")] = "gymnasium:CartPole-v1"
    # A preset of the agent to begin with in place of the environment's, such as 'atari:*', the suite's.
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    # serial, threads, processes, ray or launchpad.
    engine: Annotated[str, tyro.conf.arg(metavar="ENGINE")] = "processes"
    restarts: int = 0  # How often each node may fail and be restarted before the run ends with its error.
    # A module whose objects the file of --config, or the run, may name. Give it once for each module.
    allow: Allow = ()

    def __post_init__(self) -> None:
        config_checks.types(self)
        config_checks.at_least(self, 0, "restarts")


@dataclasses.dataclass(frozen=True)
class ResumeOptions:
    """What `repertory train --resume` takes beside the flags of `repertory train`."""

    resume: Annotated[str, tyro.conf.arg(metavar="RUN")]  # Folder of the run.
    # Where to go on. Newer checkpoints are set aside.
    checkpoint: Annotated[str, tyro.conf.arg(metavar="latest|previous|STEP|PATH")] = "latest"


_FLAGS = constructors.ConstructorRegistry()


@_FLAGS.primitive_rule
def _mapping(
    info: constructors.PrimitiveTypeInfo,
) -> constructors.PrimitiveConstructorSpec[Any] | None:
    """Mappings are `KEY=VALUE ...`; a dot in a key makes a nested mapping."""
    if typing.get_origin(info.type) is not Mapping:
        return None
    return constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[KEY=VALUE ...]",
        instance_from_str=read_pairs,
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda value: [f"{key}={of}" for key, of in value.items()],
    )


@_FLAGS.primitive_rule
def _whole(info: constructors.PrimitiveTypeInfo) -> constructors.PrimitiveConstructorSpec[Any] | None:
    """Whole numbers may be 1e5 and 1_000_000."""
    if info.type is not int:
        return None
    return constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda texts: integer(texts[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )


def read_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """Reads `KEY=VALUE ...`. Raises ValueError for an invalid pair, and for a key that is given twice."""
    made: dict[str, Any] = {}
    for pair in pairs:
        path, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"got {pair!r}, expected KEY=VALUE")
        *folders, name = path.replace("-", "_").split(".")
        inner = made
        for folder in folders:
            inner = inner.setdefault(folder, {})
            if not isinstance(inner, dict):
                raise ValueError(f"got {pair!r} after a value of {folder}, expected one of them")
        if name in inner:
            raise ValueError(f"got {pair!r} after another value of {name}, expected one of them")
        wrong = f"got {pair!r}, expected a value that is YAML: "
        with config_checks.RaisedAs(ValueError, yaml.YAMLError, wrong):
            inner[name] = config_file.parse(text)
    return made


def parse(options: type[T], arguments: Sequence[str], prog: str) -> T:
    """Parses `arguments` into the dataclass `options`; invalid ones print the reason and exit with 2."""
    _check_flags(arguments, _fields(options), prog)
    description = inspect.getdoc(options)
    return tyro.cli(options, args=list(arguments), prog=prog, description=description, registry=_FLAGS)


def _fields(options: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(options)]


def _check_flags(arguments: Sequence[str], known: Sequence[str], prog: str) -> None:
    """Raises `UsageError` with the nearest flag for a flag that there is not; tyro knows no other names."""
    flags = {f"--{name.rstrip('_')}".replace("_", "-") for name in ("help", *known)}
    for argument in arguments:
        flag = argument.split("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in flags and f"--{flag.removeprefix('--no-')}" not in flags:
            hint = config_checks.nearest(flag.removeprefix("--"), [each.removeprefix("--") for each in flags])
            hint = hint.replace("mean '", "mean '--")
            raise UsageError(f"{prog} has no flag {argument.split('=')[0]}.{hint} {prog} --help shows all.")


def check_at_least(options: Any, **least: int) -> None:
    """Raises `UsageError` if a field of `options` is less than the number of its name; None is not."""
    for name, number in least.items():
        value = getattr(options, name)
        if value is not None and value < number:
            raise UsageError(f"--{name.replace('_', '-')}: got {value}, expected at least {number}.")


def parse_groups(settings: Sequence[Any], arguments: Sequence[str], prog: str, description: str) -> list[Any]:
    """Parses one flat set of flags into several dataclasses.

    Args:
      settings: the dataclasses, with the defaults of their flags.
      arguments: the command line; invalid arguments print the reason and exit with 2.
      prog: the command, for the help.
      description: description of the command, for the help.
    """
    groups = dict(zip(("program", "run", "agent", "output"), settings, strict=False))
    annotated: Any = Annotated  # These annotations are values.
    members: list[Any] = [
        (name, annotated[type(group), tyro.conf.OmitArgPrefixes], group) for name, group in groups.items()
    ]
    flags = dataclasses.make_dataclass("Flags", members, frozen=True)
    _check_flags(arguments, [name for group in settings for name in _fields(group)], prog)
    parsed: Any = tyro.cli(flags, args=list(arguments), prog=prog, description=description, registry=_FLAGS)
    return [getattr(parsed, name) for name in groups]
