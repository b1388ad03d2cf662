"""`repertory record`: writes episodes of a run's policy, or of random actions, to a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tree
import tyro

from framework import environments, interrupts
from framework.commands.options import Allow, CommandError, UsageError, check_at_least, parse
from framework.datasets import read_episodes, record, write_episodes
from framework.environments.base import BatchedEnvironment
from framework.environments.checks import draw_legal_action
from framework.programs.loading import load_policy
from framework.runs.run_folder import git_commits
from framework.types import Nest, Step


@dataclass(frozen=True)
class RecordOptions:
    """Plays episodes with the greedy policy of a run and writes them to a folder, for --dataset."""

    # Folder of a run, or, for random actions, an environment, SUITE:NAME.
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|SUITE:NAME")]
    output: str  # The folder of the episodes. It must not exist.
    episodes: int = 100  # Number of episodes.
    # best (as evaluated), latest, random, or mixed: these three in turns.
    policy: Literal["best", "latest", "random", "mixed"] = "best"
    layout: Literal["npz", "minari"] = "npz"  # Shards of this project, or Minari's files.
    noise: float = 0.0  # Chance of a random action in each step.
    seed: int = 0  # Seeds the environment's episodes and random actions.
    allow: Allow = ()  # A module whose objects the run may name. Give it once for each module.


def main(arguments: Sequence[str]) -> int:
    options = parse(RecordOptions, arguments, prog="repertory record")
    check_at_least(options, episodes=1, seed=0, noise=0)
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
    names = ("best", "latest", "random") if options.policy == "mixed" else (options.policy,)
    policies = [
        None if name == "random" else load_policy(options.source, name, options.allow) for name in names
    ]
    interrupts.clean_up_first()
    if is_run:
        known = [each for each in policies if each is not None] or [load_policy(options.source)]
        environment = known[0].make_environment(1, options.seed)
    else:
        environment = environments.make(options.source, num_envs=1, seed=options.seed)
    try:
        spec, acts = environment.spec, [_Acting(each, environment, options.noise, rng) for each in policies]
        played = _in_turns(environment, acts, options.episodes)
        path = write_episodes(options.output, played, layout=options.layout, spec=spec, about=about)
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
