"""The agents: one file each, found by name.

::

    import agents

    agent = agents.make("dqn", learning_rate=3e-4)        # an agent from its name and config fields
    policy = agents.load_policy("runs/cartpole")          # what a run has learned
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agents.commands.loading import LoadedPolicy


@dataclasses.dataclass(frozen=True)
class AgentEntry:
    """Where an agent is found; nothing is imported before ``load``.

    Attributes:
      name: on the command line.
      module: its file.
      agent: the name of the class that takes the config.
      config: the name of its config, a frozen dataclass.
      summary: one line for ``repertory list``.
    """

    name: str
    module: str
    agent: str
    config: str
    summary: str

    def load(self) -> tuple[Any, type]:
        """``(agent class, config class)``."""
        module = importlib.import_module(self.module)
        return getattr(module, self.agent), getattr(module, self.config)


_ENTRIES = (
    AgentEntry("dqn", "agents.dqn", "DQN", "DQNConfig", "deep Q-learning from replay, for discrete actions"),
    AgentEntry(
        "impala",
        "agents.impala",
        "IMPALA",
        "IMPALAConfig",
        "V-trace actor-critic with actors that run ahead, for discrete actions",
    ),
    AgentEntry(
        "ppo", "agents.ppo", "PPO", "PPOConfig", "proximal policy optimization, on-policy, any actions"
    ),
    AgentEntry(
        "random_actions",
        "agents.random_actions",
        "RandomActions",
        "RandomActionsConfig",
        "acts at random and learns nothing; a floor for scores",
    ),
    AgentEntry(
        "sac", "agents.sac", "SAC", "SACConfig", "soft actor-critic from replay, real or discrete actions"
    ),
)
REGISTRY = {entry.name: entry for entry in _ENTRIES}


def find(name: str) -> AgentEntry:
    """The agent called ``name`` (``-`` and ``_`` are the same); ValueError with what there is."""
    entry = REGISTRY.get(name.replace("-", "_"))
    if entry is None:
        close = difflib.get_close_matches(name, REGISTRY, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"Unknown agent {name!r}; the agents are {', '.join(REGISTRY)}.{hint}")
    return entry


def make_config(name: str, /, **fields: Any) -> Any:
    """The config of agent ``name`` with these fields; ValueError names a field that it does not have."""
    _, config = find(name).load()
    known = [field.name for field in dataclasses.fields(config)]
    for field in fields:
        if field not in known:
            close = difflib.get_close_matches(field, known, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{config.__name__} has no field {field!r}; it has {', '.join(known)}.{hint}")
    return config(**fields)


def make(name: str, /, **fields: Any) -> Any:
    """The agent called ``name`` with these config fields."""
    agent, _ = find(name).load()
    return agent(make_config(name, **fields))


def load_policy(run: Any, checkpoint: Any = None) -> LoadedPolicy:
    """What the run in the folder ``run`` has learned, ready to act: ``action = policy(observation)``.

    Args:
      run: the folder of the run.
      checkpoint: which one: None for the newest, "best" for the parameters of the best evaluation,
        "previous", a step, or a folder.
    """
    from agents.commands.loading import load_policy

    return load_policy(run, checkpoint)
