"""`repertory eval`: how good is what a run has learned."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from framework.commands.errors import UsageError
from framework.commands.options import parse
from framework.programs.loading import LoadedPolicy, load_policy
from framework.programs.run_folder import RunFolder


@dataclass(frozen=True)
class EvalOptions:
    """Plays episodes greedily with what a run has learned, and prints their returns."""

    run: tyro.conf.Positional[str]  # Folder of the run.
    episodes: int = 100  # How many are played.
    envs: int = 20  # How many at the same time.
    seed: int = 0  # Of the environments and of the policy's random choices.
    checkpoint: str = "latest"  # Or "best" (as evaluated during the run), "previous", or a step.


def main(arguments: Sequence[str]) -> int:
    options = parse(EvalOptions, arguments, prog="repertory eval")
    for name in ("episodes", "envs"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name}: got {getattr(options, name)}, expected at least 1.")
    policy = load_policy(options.run, options.checkpoint)
    result = evaluate(policy, options.episodes, min(options.envs, options.episodes), options.seed)
    RunFolder.open(options.run).write_json("evaluation.json", result)
    print(
        f"{result['episodes']} episodes with the checkpoint of step {result['step']:,}: "
        f"return {result['mean']:.1f} ± {result['standard_deviation']:.1f} "
        f"(from {result['minimum']:.1f} to {result['maximum']:.1f}), "
        f"length {result['mean_length']:.1f}"
    )
    return 0


def evaluate(policy: LoadedPolicy, episodes: int, envs: int, seed: int) -> dict[str, Any]:
    """Plays `episodes` episodes, `envs` at a time; each env its share, so that none is favoured."""
    from framework.actors import EnvironmentLoop

    environment = policy.make_environment(envs, seed)
    try:
        loop = EnvironmentLoop(environment, policy.make_actor(envs, seed), should_update=False)
        played = loop.run_episodes(episodes)
    finally:
        environment.close()
    returns = [float(value) for value in played["episode_return"]]
    return {
        "episodes": len(returns),
        "step": policy.step,
        "checkpoint": policy.checkpoint.name,
        "seed": seed,
        "mean": statistics.fmean(returns),
        "standard_deviation": statistics.pstdev(returns),
        "minimum": min(returns),
        "maximum": max(returns),
        "mean_length": statistics.fmean(played["episode_length"].tolist()),
        "returns": returns,
    }
