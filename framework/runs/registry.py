"""Agents by name: entry points of the group `repertory.agents`, and `module:object`.

```python
agent = make_agent("dqn", learning_rate=3e-4)         # from a name and fields of its config
agent = make_agent("my_agents.soft_q:SoftQ")          # a class without an entry point
agent = make_agent("my_agents.soft_q:make_small")     # a function that returns an agent
```

The class or function takes one argument, `config`: a frozen dataclass with a default for every field. Without
the argument it uses the defaults. A class or function that takes no `config` makes an agent without settings.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable
from importlib import metadata
from typing import Any

from framework import config_checks, core
from framework.objects import load_callable, target_of

GROUP = "repertory.agents"


@dataclasses.dataclass(frozen=True)
class NoConfig:
    """The config of an agent that has none."""


@dataclasses.dataclass(frozen=True)
class AgentEntry:
    """The location of an agent's class, or of a function that makes the agent. `load` imports it.

    Attributes:
      name: name on the command line and in the files of a run.
      target: `module:object`.
      found: the class or function, if it is at hand; it need not have a name then.
    """

    name: str
    target: str
    found: Callable[..., core.Agent] | None = None

    def load(self) -> Callable[..., core.Agent]:
        """The agent's class or function. Raises ValueError if it cannot be imported."""
        if self.found is not None:
            return self.found
        return load_callable(self.target, f"agent: got {self.name!r}", "an agent's class, or a function")

    def make(self, config: Any = None) -> core.Agent:
        """The agent with this config, or with the default one. Raises ValueError if it is no agent."""
        found = self.load()
        agent = found() if config is None or isinstance(config, NoConfig) else found(config)
        if not isinstance(agent, core.Agent):
            raise ValueError(f"agent: got {self.name!r}, which makes {agent!r}, expected a core.Agent.")
        if not isinstance(found, type):
            agent.made_by = self.name
        return agent

    def summary(self) -> str:
        """The first line of the class's docstring."""
        return (inspect.getdoc(self.load()) or "").partition("\n")[0].rstrip(".")

    def make_config(self, **fields: Any) -> Any:
        """The agent's config with these fields; `NoConfig` if it has none.

        Raises:
          ValueError: It has no such field.
        """
        config: Any = getattr(self.make(), "config", None)
        if not _is_config(config) or "config" not in inspect.signature(self.load()).parameters:
            config_checks.names(self.name, fields, ())
            return NoConfig()
        known = [field.name for field in dataclasses.fields(config)]
        config_checks.names(type(config).__name__, fields, known)
        return dataclasses.replace(config, **fields)


def agent_names() -> list[str]:
    """The names of all agents that installed packages declare."""
    return sorted(_entry_points())


def find_agent(name: str) -> AgentEntry:
    """The agent called `name` (`-` and `_` are equal), or `module:object`.

    Raises:
      ValueError: No agent has this name.
    """
    if ":" in name:
        return AgentEntry(name, name)
    known = _entry_points()
    by_plain_name = {declared.replace("-", "_"): declared for declared in known}
    declared = name if name in known else by_plain_name.get(name.replace("-", "_"))
    if declared is not None:
        return AgentEntry(declared, known[declared])
    if not known:
        raise ValueError(
            f"agent: got {name!r}, but no installed package declares agents. Run pip install -e . in the "
            "repository, or give module:object."
        )
    raise ValueError(
        f"Unknown agent {name!r}; the agents are {', '.join(sorted(known))}, or module:object."
        f"{config_checks.nearest(name, known)}"
    )


def make_agent(name: str, /, **fields: Any) -> core.Agent:
    """The agent called `name`, or `module:object`, with these fields of its config."""
    entry = find_agent(name)
    return entry.make(entry.make_config(**fields) if fields else None)


def describe_agent(agent: core.Agent) -> tuple[str, dict[str, Any]]:
    """The name that `find_agent` makes the agent from, and the fields of its config."""
    target = agent.made_by or target_of(type(agent)) or type(agent).__qualname__
    name = next((name for name, other in _entry_points().items() if other == target), target)
    config: Any = getattr(agent, "config", None)
    if not _is_config(config) or (agent.made_by and find_agent(agent.made_by).make_config() == NoConfig()):
        return name, {}
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return name, {key: of.value if isinstance(of, enum.Enum) else of for key, of in fields.items()}


def _is_config(config: Any) -> bool:
    return dataclasses.is_dataclass(config) and not isinstance(config, type)


def _entry_points() -> dict[str, str]:
    return {entry.name: entry.value for entry in metadata.entry_points(group=GROUP)}
