"""The settings with which a run begins: the defaults, its preset, and what its user gives."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from framework import config_checks, core
from framework.objects import target_of
from framework.runs import config_file
from framework.runs.presets import DEFAULTS, Preset, find_preset
from framework.runs.registry import AgentEntry, NoConfig, find_agent
from framework.runs.run_config import RunConfig, shorter_period


def settings_of(
    agent: str | Callable[..., core.Agent] | core.Agent,
    environment: str | Callable[..., Any],
    run: RunConfig | Mapping[str, Any] | None,
    given: Mapping[str, Any],
) -> tuple[core.Agent, RunConfig, str]:
    """The agent and the settings of a run, and a line on the preset; see `framework.train`.

    Raises:
      ValueError: A setting is unknown or has a wrong value.
      TypeError: The agent is none, or `run` is neither a `RunConfig` nor a mapping.
    """
    entry, agent_config = _entry(agent)
    preset, line = find_preset(entry.load(), environment)
    of_run, of_agent = (
        [field.name for field in dataclasses.fields(each)] for each in (RunConfig, agent_config)
    )
    config_checks.names("train", given, [*of_run, *of_agent])
    in_run = {name: value for name, value in given.items() if name in of_run}
    in_agent = {name: value for name, value in given.items() if name not in of_run}
    if isinstance(run, RunConfig):
        config = dataclasses.replace(run, **in_run)
    elif run is None or isinstance(run, Mapping):
        config_checks.names("run", run or {}, of_run)
        values = {**DEFAULTS, **preset.run, **(run or {}), **in_run}
        config = config_file.from_plain(RunConfig(), values, "run")
        if "evaluate_period" not in {**(run or {}), **in_run}:
            config = with_ten_evaluations(config, preset)
    else:
        raise TypeError(f"run: got {run!r}, expected a RunConfig or a mapping of its fields.")
    if isinstance(agent, core.Agent):
        if not in_agent:
            return agent, config, line
        made = entry.make(config_file.from_plain(agent_config, in_agent, "train"))
        made.networks_fn = agent.networks_fn
        return made, config, line
    values = {**preset.agent, **in_agent} if agent_config != NoConfig() else {}
    return entry.make(config_file.from_plain(agent_config, values, "train")), config, line


def with_ten_evaluations(config: RunConfig, preset: Preset) -> RunConfig:
    """A run that is shorter than its preset has a period of its own, too."""
    period, steps = config.evaluate_period, config.max_env_steps
    usual = {**DEFAULTS, **preset.run}["max_env_steps"]
    if not isinstance(period, int) or steps is None or usual is None or steps >= usual:
        return config
    return dataclasses.replace(config, evaluate_period=shorter_period(period, steps))


def _entry(agent: Any) -> tuple[AgentEntry, Any]:
    """What makes the agent, and the config that its settings change."""
    if isinstance(agent, str):
        entry = find_agent(agent)
        return entry, entry.make_config()
    if isinstance(agent, core.Agent):
        entry = find_agent(agent.made_by) if agent.made_by else _entry_of(type(agent))
        config = getattr(agent, "config", None)
        return entry, entry.make_config() if config is None else copy.copy(config)
    if not callable(agent):
        raise TypeError(f"agent: got {agent!r}, expected a name, a class, a function or an agent.")
    entry = _entry_of(agent)
    return entry, entry.make_config()


def _entry_of(found: Callable[..., core.Agent]) -> AgentEntry:
    name = str(target_of(found) or getattr(found, "__qualname__", repr(found)))
    return AgentEntry(name, name, found)
