"""Dataclasses as flags, by tyro: a field is a flag and the comment behind it is its help."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

T = TypeVar("T")


def parse(options: type[T], arguments: Sequence[str], prog: str, description: str = "") -> T:
    """An instance of the dataclass ``options`` from ``arguments``; wrong ones print why and exit with 2."""
    import tyro

    return tyro.cli(
        options, args=list(arguments), prog=prog, description=description or inspect.getdoc(options)
    )


def parse_groups(
    groups: Mapping[str, tuple[type, Mapping[str, Any]]],
    arguments: Sequence[str],
    prog: str,
    description: str,
) -> dict[str, dict[str, Any]]:
    """Several dataclasses as one flat set of flags.

    Args:
      groups: heading to ``(dataclass, values that replace its defaults)``. No two may share a field's name.
      arguments: the command line.
      prog: the command, for the help.
      description: what it does.

    Returns:
      Heading to ``{field: value}``.
    """
    import tyro

    annotated: Any = Annotated  # these annotations are values, made as we go
    members: list[Any] = []
    for heading, (cls, values) in groups.items():
        flags = _flags(cls, values)
        annotation = annotated[flags, tyro.conf.OmitArgPrefixes]
        members.append((heading, annotation, flags()))
    together: Any = dataclasses.make_dataclass("Flags", members, frozen=True)
    parsed: Any = tyro.cli(together, args=list(arguments), prog=prog, description=description)
    result = {}
    for heading in groups:
        group = getattr(parsed, heading)
        result[heading] = {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
    return result


def field_comments(cls: type) -> dict[str, str]:
    """Field name to the comment on its lines; empty where the source is not at hand."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    by_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    comments = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            comments[node.target.id] = " ".join(by_line[line] for line in lines if line in by_line)
    return comments


def _flags(cls: type, values: Mapping[str, Any]) -> Any:
    import tyro

    hints = typing.get_type_hints(cls)
    comments = field_comments(cls)
    defaults = cls()
    annotated: Any = Annotated
    members: list[Any] = []
    for field in dataclasses.fields(cls):
        hint = annotated[hints[field.name], tyro.conf.arg(help=comments.get(field.name) or None)]
        default = values.get(field.name, getattr(defaults, field.name))
        members.append((field.name, hint, dataclasses.field(default=default)))
    flags = dataclasses.make_dataclass(cls.__name__, members, frozen=True)
    flags.__doc__ = (inspect.getdoc(cls) or "").split("\n\n")[0]
    return flags
