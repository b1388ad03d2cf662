"""What a sweep consists of, and its folder.

```
DIRECTORY/
  sweep.yaml             its settings: `repertory sweep DIRECTORY` goes on with them
  runs/NAME/             the run folder of each variant
  variants/NAME.yaml     the settings of the run, as `repertory train --config` takes them
  logs/NAME.log          what the run printed
  state.json             how runs ended that have no result
  table.csv, table.md, curves-ENVIRONMENT.png
```
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from framework import config_checks
from framework.loggers.files import read_jsonl
from framework.runs import config_file
from framework.runs.run_folder import differences
from framework.runs.run_lock import RunError, RunLock

_OWN = {"agent": "agents", "environment": "environments", "seed": "seeds", "directory": "directory"}
_RANGE = "expected numbers such as {low: 1e-5, high: 1e-2, log: true}: low < high, and above 0 with log."


@dataclasses.dataclass(frozen=True)
class Variant:
    """One run of a sweep: an agent in an environment, with these settings and this seed."""

    name: str
    agent: str
    environment: str
    seed: int
    settings: Mapping[str, Any]

    def content(self) -> dict[str, Any]:
        """The file of `repertory train --config`. A dot in the name of a setting makes a mapping."""
        made: dict[str, Any] = {"agent": self.agent, "environment": self.environment, "seed": self.seed}
        for path, value in self.settings.items():
            *folders, name = path.split(".")
            functools.reduce(lambda inner, each: inner.setdefault(each, {}), folders, made)[name] = value
        return made


@dataclasses.dataclass(frozen=True)
class Sweep(config_checks.NamedFields):
    """The settings of a sweep: the keys of its file, and flags of `repertory sweep`.

    Raises:
      ValueError: A field has a wrong type.
    """

    agents: tuple[str, ...] = ()  # Names of agents, or module:object.
    environments: tuple[str, ...] = ()  # By default the agents' own, if that is the same.
    seeds: int | tuple[int, ...] = 1  # N, which means 1 to N, or several seeds.
    # Settings of `repertory train` and their values: n_step=1,3 hidden_sizes=[[64],[64,64]] engine=serial.
    # One value is the same for all runs. Of several, each is combined with each of the other settings'.
    set: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Ranges for --optuna, as in learning_rate.low=1e-5 learning_rate.high=1e-2 learning_rate.log=true.
    search: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    slots: int = 1  # Runs at the same time, each with its part of this machine's cores and GPUs.
    executor: Literal["local", "slurm"] = "local"  # Where the runs are: here, or each in a job of Slurm.
    # Parameters of the jobs, as submitit names them: timeout_min=600 slurm_partition=gpu gpus_per_node=1.
    slurm: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    directory: str | None = None  # The folder: by default one in sweeps/, the same for the same runs.
    # Trials of Optuna for each agent in each environment. They choose from `search`, and from values in
    # `set`. Optuna's median pruner ends runs that are not promising.
    optuna: int | None = None
    # What the trials make large: the last return, or that return divided by the CPU seconds of the run.
    objective: Literal["return", "return_per_cpu_second"] = "return"
    final_seed: int | None = None  # Evaluates each run at its end, as `repertory eval --seed` does; or 1000.
    final_episodes: int | None = None  # Episodes of that evaluation; or 100.

    def __post_init__(self) -> None:
        for name in ("agents", "environments"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        config_checks.types(self)
        object.__setattr__(self, "set", _flat(self.set))

    def check(self) -> None:
        """Raises ValueError if a value is wrong or contradicts another one. The text names the field."""
        config_checks.at_least(self, 1, "slots", "optuna", "final_episodes")
        config_checks.at_least(self, 0, "final_seed")
        values = {name: getattr(self, name) for name in ("agents", "environments")}
        values |= {"seeds": self.all_seeds, **{f"set: {name}": of for name, of in self.set.items()}}
        for name, of in values.items():
            if not of or any(each in of[:i] for i, each in enumerate(of)):
                raise ValueError(f"{name}: got {list(of)!r}, expected at least one value, and none twice.")
        for name in (*self.set, *self.search):
            if name in _OWN:
                raise ValueError(f"set: got {name!r}, expected a setting of one run. Give {_OWN[name]}.")
            if name in self.set and name in self.search:
                raise ValueError(f"search: got {name!r}, which set has, too. Leave one of them out.")
        for name, given in self.search.items():
            of = given if isinstance(given, Mapping) else {}
            config_checks.names(f"search: {name}", of, ("low", "high", "log"))
            low: Any = of.get("low")
            high, log = of.get("high"), of.get("log", False)
            numbers = all(isinstance(each, int | float) for each in (low, high))
            if not numbers or not low < high or (log and low <= 0):
                raise ValueError(f"search: {name}: got {given!r}, {_RANGE}")
        refuse = functools.partial(config_checks.refuse, self)
        if self.optuna is None and self.search:
            refuse("search", " without trials. Give optuna, the number of trials.")
        if self.optuna is None and self.objective != "return":
            refuse("objective", " without trials. Give optuna, the number of trials.")
        if self.optuna and not self.search and all(len(of) == 1 for of in self.set.values()):
            refuse("optuna", ", and nothing to choose. Give search, or several values in set.")
        if self.slurm and self.executor != "slurm":
            refuse("slurm", " with another executor. Give executor: slurm.")

    @property
    def all_seeds(self) -> Sequence[int]:
        """The seeds of each variant."""
        return self.seeds if isinstance(self.seeds, tuple) else range(1, self.seeds + 1)

    @property
    def final(self) -> tuple[int, int] | None:
        """Seed and episodes of the last evaluation; None if it is the run's own."""
        if self.final_seed is None and self.final_episodes is None:
            return None
        return 1_000 if self.final_seed is None else self.final_seed, self.final_episodes or 100

    @property
    def place(self) -> str:
        """`directory`, or a folder in `sweeps/` whose name says what runs."""
        runs = [self.agents, self.environments, self.set, self.search, self.seeds, self.optuna]
        return self.directory or os.path.join("sweeps", _short("-".join(self.agents), repr(runs)))

    @property
    def varied(self) -> list[str]:
        """The names of the settings that are not the same for all runs."""
        return [*self.search, *(name for name, of in self.set.items() if len(of) > 1)]

    def variants(
        self, agent: str, environment: str, settings: Mapping[str, Any], trial: str = ""
    ) -> list[Variant]:
        """The runs of an agent in an environment, one for each seed; `trial` names their settings."""
        varied = (
            [trial] if trial else [f"{name}={settings[name]}" for name in self.varied if name in settings]
        )
        begin = "-".join([agent, environment.partition(":")[2] or environment, *varied])
        return [
            Variant(_short(f"{begin}-seed{seed}"), agent, environment, seed, settings)
            for seed in self.all_seeds
        ]

    def groups(self) -> Iterable[list[Variant]]:
        """For each agent, environment and combination of the values, the runs with each seed."""
        for agent, environment, *values in itertools.product(
            self.agents, self.environments, *self.set.values()
        ):
            yield self.variants(agent, environment, dict(zip(self.set, values, strict=True)))


class SweepFolder:
    """The folder of a sweep; see this module.

    Args:
      path: of the folder, which need not exist.
      sweep: its settings; None reads those in `sweep.yaml`.
    """

    def __init__(self, path: str | os.PathLike[str], sweep: Sweep | None = None):
        self.path = Path(os.path.abspath(path))
        self._recording = threading.Lock()
        try:
            with config_checks.RaisedAs(RunError, (ValueError, TypeError), f"{path}: "):
                self.sweep = sweep or Sweep(**config_file.read(self.path / "sweep.yaml"))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RunError(
                f"{path} is no sweep: it has no sweep.yaml. Give the folder of a sweep."
            ) from error
        self.states: dict[str, dict[str, Any]] = _read(self.path / "state.json") or {}

    @property
    def lock(self) -> RunLock:
        """Held by the process that runs the sweep."""
        return RunLock(self.path)

    def run(self, name: str) -> Path:
        """The folder of a run."""
        return self.path / "runs" / name

    def file(self, name: str) -> Path:
        """The settings of a run."""
        return self.path / "variants" / f"{name}.yaml"

    def log(self, name: str) -> Path:
        """What a run printed."""
        return self.path / "logs" / f"{name}.log"

    def names(self) -> list[str]:
        """All runs that were added."""
        return sorted(path.stem for path in (self.path / "variants").glob("*.yaml"))

    def save(self) -> None:
        """Makes the folder and writes the settings."""
        for name in ("runs", "variants", "logs"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        content = {**dataclasses.asdict(self.sweep), "directory": None}  # The folder may be moved.
        config_file.replace(self.path / "sweep.yaml", yaml.safe_dump(content, sort_keys=False))

    def add(self, variants: Iterable[Variant]) -> None:
        """Writes the settings of runs. Raises RunError if one of them has begun with others."""
        for variant in variants:
            file, content = self.file(variant.name), variant.content()
            changed = differences(config_file.read(file), content) if file.exists() else ""
            if changed and self.run(variant.name).exists():
                raise RunError(
                    f"{self.run(variant.name)}: {changed}. A sweep that goes on keeps the settings of its "
                    "runs. Give another directory, or remove this run."
                )
            config_file.write(file, content)

    def record(self, name: str, **state: Any) -> None:
        """Keeps how a run ended, in place of what was known."""
        with self._recording:
            self.states[name] = state
            config_file.replace(self.path / "state.json", json.dumps(self.states, indent=1))

    def state(self, name: str) -> str:
        """`finished`, `running`, `failed`, `pruned`, `stopped`, or `waiting`."""
        if self.outcome(name) is not None:
            return "finished"
        if RunLock(self.run(name)).pid() is not None:
            return "running"
        return str(self.states.get(name, {}).get("state", "waiting"))

    def outcome(self, name: str) -> dict[str, Any] | None:
        """The last numbers of a run; None until it has finished, the last evaluation included."""
        result, run = _read(self.run(name) / "result.json"), self.run(name)
        if result is None:
            return None
        if result.get("episode_return") is None and (run / "metrics.jsonl").exists():
            for row in read_jsonl(run / "metrics.jsonl"):
                result |= row if row.get("label") == "evaluator" else {}
        if self.sweep.final is not None:
            last = _read(run / "evaluation.json") or {}
            if (last.get("seed"), last.get("episodes")) != self.sweep.final:
                return None
            result["episode_return"] = last["mean"]
        return {each: result.get(each) for each in ("env_steps", "learner_steps", "episode_return")}

    def cpu_seconds(self, name: str) -> float:
        """CPU seconds of a run, in all of its starts that were not killed."""
        file = self.run(name) / "cpu_seconds.txt"
        return sum(map(float, file.read_text().split())) if file.exists() else 0.0


def _read(path: Path) -> dict[str, Any] | None:
    """The object in a file of JSON; None if there is no such file."""
    content: dict[str, Any] | None = json.loads(path.read_text("utf-8")) if path.exists() else None
    return content


def _flat(given: Mapping[str, Any], before: str = "") -> dict[str, tuple[Any, ...]]:
    """The values of each setting. A mapping has the values of settings whose names have a dot."""
    made: dict[str, tuple[Any, ...]] = {}
    for name, of in given.items():
        name = f"{before}{name.replace('-', '_')}"
        if isinstance(of, Mapping):
            made |= _flat(of, f"{name}.")
            continue
        if isinstance(of, str) and "," in of:
            with config_checks.RaisedAs(ValueError, yaml.YAMLError, f"set: {name}: got {of!r}: "):
                of = config_file.parse(f"[{of}]")
        values = of if isinstance(of, list | tuple) else [of]
        made[name] = tuple(
            None if each == "None" else each for each in values
        )  # The flags of `train` say so.
    return made


def _short(text: str, more: str = "") -> str:
    """A name for a file. It ends with a hash if the text has other characters, or is long, or of `more`."""
    plain = re.sub(r"[^\w.=+-]+", "_", text)[:120]
    digest = hashlib.sha256(f"{text}{more}".encode()).hexdigest()[:6]
    return plain if plain == text and not more else f"{plain}-{digest}"
