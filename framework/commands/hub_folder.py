"""A folder with the policy of a run as model hubs take it, from which `load_policy` acts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from framework.checkpoints import Checkpointer, torch_part
from framework.commands import plot
from framework.commands.options import UsageError
from framework.export import export
from framework.parameters import state_of
from framework.programs.loading import LoadedPolicy
from framework.runs import config_file
from framework.runs.run_folder import RunFolder

# Settings that may hold keys, or names of machines and folders. They are not for others.
_PRIVATE: dict[str, Any] = {"resources": {}, "loggers": [], "init": None}
_README = """---
{metadata}---

# {title}

A policy trained with Repertory, an actor-model framework for reinforcement learning in PyTorch.

![Learning curve](curve.png)

## Results

{table}

## Act with it

```python
from framework.programs import load_policy

policy = load_policy("{folder}")  # This folder.
environment = policy.make_environment(num_envs=1)
timestep = environment.reset()
for _ in range(500):
    timestep = environment.step(policy(timestep.observation, timestep.first()))
```

{exported}`config.yaml` holds all settings, the versions of packages and the commit.
`repertory train --config config.yaml` repeats the run.
"""


def check(path: Path) -> None:
    """Raises UsageError if `path` cannot become the folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"--folder: got {path}, which is there, expected a new or an empty folder.")


def shared_settings(run: RunFolder) -> dict[str, Any]:
    """The content of the run's `config.yaml` without what may hold keys, or names of machines and folders."""
    content = {**config_file.read(run.path / "config.yaml"), **_PRIVATE}
    recorded = {**content[config_file.RECORDED], "command": "not recorded"}
    recorded.pop("resumed", None)
    return {**content, config_file.RECORDED: recorded}


def read_json(run: RunFolder, name: str) -> dict[str, Any]:
    """A file of the run's folder; empty if it is not there, or is no mapping."""
    try:
        content = json.loads((run.path / name).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write(
    path: Path, run: RunFolder, policy: LoadedPolicy, facts: Mapping[str, str], film: tuple[str, bytes] | None
) -> None:
    """Writes `config.yaml`, a checkpoint, the exported policy, a curve, a video and `README.md`, and prints
    what cannot be written.

    Args:
      path: the folder.
      run: the run.
      policy: its policy.
      facts: names and texts of the table of results.
      film: suffix and bytes of a video; None without.
    """
    path.mkdir(parents=True, exist_ok=True)
    config_file.write(path / "config.yaml", shared_settings(run))
    parts = {}
    if isinstance(policy.networks, torch.nn.Module | Mapping) and state_of(policy.networks):
        learner = policy.agent.make_learner(policy.networks, policy.spec)
        parts["learner"] = torch_part({"learner": learner.save(), "steps": 0})
    note = {"reason": f"from {policy.checkpoint.name}"}
    Checkpointer(path / "checkpoints").save(policy.step, parts, note)
    if film is not None:
        (path / f"replay{film[0]}").write_bytes(film[1])  # The name that hubs show.
    plot.draw_run(run, path / "curve.png")
    exported = _export(policy, path)
    name = run.environment_name.partition(":")[2] or run.environment_name
    score = _score(run, policy)
    metric = {"type": "mean_reward", "name": "mean_reward", "value": score, "verified": False}
    task = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
    result = {"task": task, "dataset": {"name": name, "type": name}, "metrics": [metric]}
    metadata: dict[str, Any] = {
        "library_name": "repertory",
        "tags": [name, run.agent, "reinforcement-learning", "deep-reinforcement-learning"],
        "model-index": [{"name": f"{run.agent}-{name}", "results": [result]}] if score else [],
    }
    table = "\n".join(
        ["| | |", "|---|---|", *(f"| {what} | {text} |" for what, text in facts.items() if text)]
    )
    text = _README.format(
        metadata=config_file.dump({name: value for name, value in metadata.items() if value}),
        title=f"{run.agent} in {run.environment_name}",
        table=table,
        folder=path.name,
        exported=exported,
    )
    config_file.replace(path / "README.md", text)


def _score(run: RunFolder, policy: LoadedPolicy) -> str:
    """Mean and standard deviation of `repertory eval` with this checkpoint, or the run's mean, or empty."""
    played = read_json(run, "evaluation.json")
    same = {"checkpoint": policy.checkpoint.name, "step": policy.step, "best": policy.is_best}
    if {name: played.get(name) for name in same} == same:
        return f"{played['mean']:.2f} +/- {played['standard_deviation']:.2f}"
    rows = [row for row in run.rows() if row.get("label") == "evaluator" and "episode_return" in row]
    rows = [row for row in rows if row.get("env_steps", 0) <= policy.step]
    return f"{rows[-1]['episode_return']:.2f}" if rows else ""


def _export(policy: LoadedPolicy, path: Path) -> str:
    """Writes the policy as a file that acts without Repertory; returns what `README.md` says about it."""
    try:
        file = export(policy, path)
    except ValueError as error:  # It does not act with torch.
        print(f"no exported policy: {error}")
        return ""
    return (
        f"`{file.name}` is the policy as one file. `{file.with_suffix('.py').name}` acts with it, without "
        f'Repertory: `load("{file.name}")(observation)`.\n\n'
    )
