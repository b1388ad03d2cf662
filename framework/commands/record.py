"""`repertory record`: writes episodes of a run's policy or replay, or of random actions, to a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tree
import tyro

from framework import environments, interrupts
from framework.checkpoints import Checkpointer, CheckpointError
from framework.commands.options import Allow, CommandError, UsageError, check_at_least, parse
from framework.config_checks import RaisedAs
from framework.datasets import EpisodeDataset, read_episodes, record, write_episodes
from framework.datasets.replayed import replayed
from framework.environments.base import BatchedEnvironment
from framework.environments.checks import draw_legal_action
from framework.programs.loading import LoadedPolicy, load_policy
from framework.runs.checkpoints import replay_parts
from framework.runs.run_folder import git_commits
from framework.specs import EnvironmentSpec
from framework.types import Nest, Step


@dataclass(frozen=True)
class RecordOptions:
    """Writes episodes of the greedy policy of a run, or of its replay, to a folder, for --dataset."""

    # Folder of a run, or, for random actions, an environment, SUITE:NAME.
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|SUITE:NAME")]
    output: str  # The folder of the episodes. It must not exist.
    episodes: int | None = None  # Number of episodes. None: 100, or with replay all; else its newest.
    # best (as evaluated), latest, random, mixed (these three in turns), or replay: what the run's actors did,
    # as far as the replay of its newest checkpoint has it.
    policy: Literal["best", "latest", "random", "mixed", "replay"] = "best"
    layout: Literal["npz", "minari"] = "npz"  # Shards of this project, or Minari's files.
    compress: bool = False  # Smaller shards of npz, which are read into memory, not mapped.
    noise: float = 0.0  # Chance of a random action in each step.
    seed: int = 0  # Seeds the environment's episodes and random actions.
    allow: Allow = ()  # A module whose objects the run may name. Give it once for each module.


def main(arguments: Sequence[str]) -> int:
    options = parse(RecordOptions, arguments, prog="repertory record")
    check_at_least(options, episodes=1, seed=0, noise=0)
    if options.policy == "replay" and options.noise:
        raise UsageError(f"--noise: got {options.noise} with replay, expected 0: its actions were taken.")
    if options.compress and options.layout != "npz":
        raise UsageError(f"--compress: got --layout {options.layout}, expected npz. Leave one out.")
    if options.noise > 1:
        raise UsageError(f"--noise: got {options.noise}, expected a chance from 0 to 1.")
    if Path(options.output).exists():
        raise UsageError(f"--output: {options.output} exists. Give a new folder, or remove this one.")
    is_run = (Path(options.source) / "config.yaml").exists()
    if not is_run and (options.policy != "random" or ":" not in options.source):
        raise UsageError(
            f"got {options.source!r}, which holds no run, expected a run's folder, or SUITE:NAME and "
            "--policy random."
        )
    rng = np.random.default_rng(options.seed)
    about: dict[str, Any] = {"algorithm_name": options.policy, "noise": options.noise, "seed": options.seed}
    about |= {"source": options.source, "commits": git_commits()}
    names: tuple[str, ...] = (options.policy,)
    names = {"mixed": ("best", "latest", "random"), "replay": ()}.get(options.policy, names)
    policies = [
        None if name == "random" else load_policy(options.source, name, options.allow) for name in names
    ]
    interrupts.clean_up_first()
    if is_run:
        known = [each for each in policies if each is not None]
        known = known or [load_policy(options.source, allow=options.allow)]
        environment = known[0].make_environment(1, options.seed)
    else:
        environment = environments.make(options.source, num_envs=1, seed=options.seed)
    try:
        spec, acts = environment.spec, [_Acting(each, environment, options.noise, rng) for each in policies]
        if options.policy == "replay":
            played: Iterable[Step] = _replayed(known[0], spec, options.episodes)
        else:
            played = _in_turns(environment, acts, options.episodes or 100)
        how: dict[str, Any] = {"layout": options.layout, "compress": options.compress}
        path = write_episodes(options.output, played, spec=spec, about=about, **how)
    except ImportError as error:
        raise CommandError(f"--layout {options.layout}: {error}") from error
    finally:
        environment.close()
    found = read_episodes(path)
    returns = [float(np.sum(each.reward)) for each in found]
    print(
        f"{len(found)} episodes, {found.num_steps:,} steps, return {np.mean(returns):.1f} "
        f"(from {min(returns):.1f} to {max(returns):.1f}) in {path}"
    )
    return 0


def _replayed(policy: LoadedPolicy, spec: EnvironmentSpec, last: int | None) -> EpisodeDataset:
    """The newest `last` episodes in the replay of a run's newest checkpoint."""
    config, reader = policy.config, policy.folder.restore()
    if config.replay_backend != "repertory":
        raise CommandError(
            f"--policy replay: got a run with replay_backend {config.replay_backend!r}, expected 'repertory'."
        )
    n_step = getattr(getattr(policy.agent, "config", None), "n_step", 1)
    with RaisedAs(CommandError, (ValueError, CheckpointError), "--policy replay: "):
        parts = [reader.part(name) for name in replay_parts("replay", config.replay_shards)]
        tables = [Checkpointer(part.parent).restore(part) for part in parts]
        return replayed(tables, spec, n_step=n_step, last=last)


class _Acting:
    """A policy, or None, with random actions now and then: legal ones if there is a mask."""

    def __init__(self, policy: Any, environment: BatchedEnvironment, noise: float, rng: np.random.Generator):
        self._policy, self._spec, self._rng = policy, environment.spec, rng
        self._noise = 1.0 if policy is None else noise

    def reset(self) -> None:
        if self._policy is not None:
            self._policy.reset()

    def __call__(self, observation: Nest) -> Nest:
        # The policy's memory sees each step.
        action = None if self._policy is None else self._policy(observation)
        if self._rng.random() < self._noise:
            one = tree.map_structure(lambda leaf: leaf[0], observation)
            legal = draw_legal_action(self._spec, one, self._rng)
            action = tree.map_structure(lambda leaf: np.asarray(leaf)[None], legal)
        return action


def _in_turns(environment: BatchedEnvironment, acts: Sequence[Any], count: int) -> Iterator[Step]:
    for index in range(count):
        yield from record(environment, acts[index % len(acts)], 1)
