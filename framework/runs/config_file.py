"""Files of settings: YAML whose keys are the flags of `repertory train`.

```yaml
agent: dqn
environment: gymnasium:CartPole-v1
learning_rate: 3e-4        # of the agent's config
num_actors: 4              # of RunConfig
```

Every run has such a file, `config.yaml`. Its entry `recorded` holds everything that is not a setting.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from framework import config_checks

T = TypeVar("T")
RECORDED = "recorded"
_MAX_DEPTH = 32


class _Loader(yaml.SafeLoader):
    """Reads numbers such as 3e-4, which YAML 1.1 takes for text, as numbers.

    Refuses a name given twice, deep nests, and aliases: a few bytes of nested ones are a value of any size.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        wrong = f"more than {_MAX_DEPTH} lists or mappings in each other" if self._depth > _MAX_DEPTH else ""
        if isinstance(event, yaml.AliasEvent):
            wrong = f"the alias '*{event.anchor}', expected its value"
        if wrong:
            raise yaml.composer.ComposerError(None, None, f"got {wrong}", event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [str(key.value) for key, _ in node.value]
        counts = collections.Counter(names)
        for (key, _), name in zip(node.value, names, strict=True):
            if counts[name] > 1:
                text = f"got {name!r} {counts[name]} times, expected once"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `_Loader` takes for numbers, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+\Z"), list("-+0123456789")
    )


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings in a file, by name; `-` in a name is `_`.

    Raises:
      OSError: The file cannot be read.
      ValueError: It is not YAML, or not a mapping, or has a name twice.
    """
    wrong = (yaml.YAMLError, ValueError)  # ValueError: not UTF-8, or a date that does not exist.
    with config_checks.RaisedAs(ValueError, wrong, f"{path}: got text that is not YAML: "):
        content = parse(Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got {type(content).__name__}, expected lines of the form NAME: VALUE.")
    settings: dict[str, Any] = {}
    for name, value in content.items():
        plain = str(name).replace("-", "_")
        if plain in settings:
            raise ValueError(f"{path}: got {plain!r} in two spellings, expected one.")
        settings[plain] = value
    return settings


def parse(text: str) -> Any:
    """The value that `text` is in a file of settings. Raises `yaml.YAMLError`."""
    return yaml.load(text, _Loader)


def write(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Writes settings in their order. Replaces an old file atomically."""
    head = "# Repeat the run: repertory train --config THIS_FILE [flags, which override it]\n"
    replace(path, head + dump(content))


def dump(content: Mapping[str, Any]) -> str:
    """The settings as YAML, in their order."""
    layout: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 110}
    return yaml.dump(dict(content), Dumper=_Dumper, default_flow_style=None, **layout)


def replace(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file beside `path` and renames it."""
    beside = Path(path).with_name(f".{Path(path).name}.new")
    beside.unlink(missing_ok=True)  # It could be a link to any file of this user.
    try:
        with open(beside, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def no_link(path: str, flags: int) -> int:
    """An `opener` for a file in a run's folder, which may be somebody else's: follows no link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def from_plain(base: T, content: Mapping[str, Any], where: str) -> T:
    """The dataclass `base` with other values. Raises ValueError for an unknown field or an invalid value."""
    config_class: Any = type(base)
    hints = config_checks.field_types(config_class)
    config_checks.names(f"{where}: {config_class.__name__}", content, list(hints))
    values = {name: config_checks.plain(hints[name], value) for name, value in content.items()}
    with config_checks.RaisedAs(ValueError, ValueError, f"{where}: ", " Correct the file."):
        return dataclasses.replace(base, **values)  # type: ignore[type-var]
