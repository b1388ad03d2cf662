"""Agents by name: entry points of the group `repertory.agents`, and `module:Class`.

```python
agent = make_agent("dqn", learning_rate=3e-4)         # from a name and fields of its config
agent = make_agent("my_agents.soft_q:SoftQ")          # a class without an entry point
```

The class of an agent takes one argument, `config`: a frozen dataclass with a default for every field. Without
the argument it uses the defaults.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pathlib
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from framework import config_checks, core

GROUP = "repertory.agents"


@dataclasses.dataclass(frozen=True)
class AgentEntry:
    """The location of an agent's class. `load` imports it.

    Attributes:
      name: name on the command line and in the files of a run.
      target: `module:Class`.
    """

    name: str
    target: str

    def load(self) -> type[core.Agent]:
        """The agent's class. Raises ValueError if it cannot be imported."""
        try:
            found: type[core.Agent] = load_object(self.target)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"agent: got {self.name!r}, which cannot be imported: {error}.") from error
        return found

    def summary(self) -> str:
        """The first line of the class's docstring."""
        return (inspect.getdoc(self.load()) or "").partition("\n")[0].rstrip(".")

    def make_config(self, **fields: Any) -> Any:
        """The agent's config with these fields. Raises ValueError for an unknown field."""
        agent_class: Any = self.load()
        config: Any = getattr(agent_class(), "config", None)
        if not _is_config(config):
            raise ValueError(
                f"{agent_class.__name__} has no settings: got {config!r} as its attribute config, expected a "
                "dataclass."
            )
        known = [field.name for field in dataclasses.fields(config)]
        config_checks.names(type(config).__name__, fields, known)
        return type(config)(**fields)


def agent_names() -> list[str]:
    """The names of all agents that installed packages declare."""
    return sorted(_entry_points())


def find_agent(name: str) -> AgentEntry:
    """The agent called `name` (`-` and `_` are equal), or `module:Class`.

    Raises:
      ValueError: No agent has this name.
    """
    if ":" in name:
        return AgentEntry(name, name)
    known = _entry_points()
    plain = name.replace("-", "_")
    if plain in known:
        return AgentEntry(plain, known[plain])
    if not known:
        raise ValueError(
            f"agent: got {name!r}, but no installed package declares agents. Run pip install -e . in the "
            "repository, or give module:Class."
        )
    raise ValueError(
        f"Unknown agent {name!r}; the agents are {', '.join(sorted(known))}, or module:Class."
        f"{config_checks.nearest(name, known)}"
    )


def make_agent(name: str, /, **fields: Any) -> core.Agent:
    """The agent called `name`, or `module:Class`, with these fields of its config."""
    entry = find_agent(name)
    agent: Any = entry.load()
    return agent(entry.make_config(**fields)) if fields else agent()


def describe_agent(agent: core.Agent) -> tuple[str, dict[str, Any]]:
    """The name of the agent's class for `find_agent`, and the fields of its config."""
    target = target_of(type(agent)) or type(agent).__qualname__
    name = next((name for name, other in _entry_points().items() if other == target), target)
    config: Any = getattr(agent, "config", None)
    if not _is_config(config):
        return name, {}
    return name, {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _is_config(config: Any) -> bool:
    return dataclasses.is_dataclass(config) and not isinstance(config, type)


def load_object(target: str) -> Any:
    """Imports `module:name`. Raises ImportError or AttributeError."""
    module, _, name = target.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def target_of(function: Callable[..., Any]) -> str | None:
    """`module:name` of a class or function for other processes; None if it cannot be imported.

    For one of the main script, the module is the name of the script's file.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        module = spec.name if spec is not None else pathlib.Path(getattr(main, "__file__", "__main__")).stem
    return None if module is None or "<" in name else f"{module}:{name}"


def _entry_points() -> dict[str, str]:
    return {entry.name: entry.value for entry in metadata.entry_points(group=GROUP)}
