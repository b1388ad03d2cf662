"""`repertory eval`: evaluates the policy of a run, in its environment or from data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tree

from framework import interrupts
from framework.actors import EnvironmentLoop
from framework.checkpoints.checkpointer import explain
from framework.commands.options import Allow, Checkpoint, CommandError, Run, check_at_least, parse
from framework.config_checks import RaisedAs
from framework.datasets import read_episodes
from framework.environments.seeded_episodes import SeededEpisodes
from framework.environments.wrappers import find_inside
from framework.programs.fitted_q import fitted_q_evaluation
from framework.programs.loading import LoadedPolicy, evaluated_or_latest, load_policy
from framework.runs.parts import make_observers
from framework.runs.run_folder import RunFolder
from launch.texts import rounded

_NAMES = ("episode_return", "episode_length", "env")


@dataclass(frozen=True)
class EvalOptions:
    """Plays episodes greedily with the policy of a run and prints their returns.

    With --dataset it plays none: it estimates the discounted return from data (fitted Q evaluation).
    """

    run: Run  # Folder of the run.
    episodes: int = 100  # Number of episodes.
    envs: int | None = (
        None  # Number of episodes at the same time. By default the run's evaluation_envs, or 20.
    )
    # Steps after which an open episode is cut. By default the run's max_evaluation_steps.
    max_steps: int | None = None
    # Episode i begins with seed 10,000 + SEED + i, whatever `envs` is. It seeds the policy, too.
    seed: int = 0
    # best (as evaluated during the run), latest, previous, or a step. By default best, and latest if nothing
    # was evaluated.
    checkpoint: Checkpoint = None
    allow: Allow = ()  # A module whose objects the run may name. Give it once for each module.
    # Estimates the return from the episodes in this folder, which `repertory record` writes.
    dataset: str | None = None
    learner_steps: int = 20_000  # Learner steps of the critic, with --dataset.


def main(arguments: Sequence[str]) -> int:
    options = parse(EvalOptions, arguments, prog="repertory eval")
    check_at_least(options, episodes=1, envs=1, seed=0, max_steps=1, learner_steps=1)
    which = options.checkpoint or evaluated_or_latest(options.run)
    policy = load_policy(options.run, which, options.allow)
    if options.dataset is not None:
        return _from_data(options, policy, options.dataset)
    envs = min(options.envs or policy.config.evaluation_envs or 20, options.episodes)
    limit = options.max_steps or policy.config.evaluation_limit
    interrupts.clean_up_first()
    result = evaluate(policy, options.episodes, envs, options.seed, limit)
    names = ("mean", "standard_deviation", "minimum", "maximum", "mean_length")
    mean, deviation, minimum, maximum, length = (rounded(result[name], 1) for name in names)
    print(
        f"{result['episodes']} episodes with the checkpoint of step {result['step']:,}: "
        f"return {mean} ± {deviation} (from {minimum} to {maximum}), length {length}"
        + (f"; {result['cut_episodes']} cut after {limit:,} steps" if "cut_episodes" in result else "")
        + ("; the parameters are those of the best evaluation" if policy.is_best else "")
    )
    _write(options, "evaluation.json", result)
    return 0


def _from_data(options: EvalOptions, policy: LoadedPolicy, path: str) -> int:
    discount = getattr(getattr(policy.agent, "config", None), "discount", 0.99)
    with RaisedAs(CommandError, (ValueError, OSError)):
        episodes = read_episodes(path)
        result = fitted_q_evaluation(
            *(policy, policy.spec, episodes),
            discount=discount,
            learner_steps=options.learner_steps,
            seed=options.seed,
        )
    value, of_data = (rounded(result[name], 3) for name in ("value", "data_return"))
    print(
        f"Fitted Q evaluation with {path}, {result['episodes']:,} episodes, {result['transitions']:,} "
        f"transitions in all: discounted return {value} (of the data: {of_data}), discount {discount:g}, "
        f"checkpoint of step {policy.step:,}"
    )
    about = {"dataset": path, "step": policy.step, "best": policy.is_best, "seed": options.seed}
    _write(options, "off_policy_evaluation.json", {**about, **result})
    return 0


def _write(options: EvalOptions, name: str, result: dict[str, Any]) -> None:
    try:
        RunFolder.open(options.run).write_json(name, result)
    except OSError as error:
        raise CommandError(f"{name} was not written: {explain(error)}.") from error


def evaluate(
    policy: LoadedPolicy, episodes: int, envs: int, seed: int, max_episode_steps: int | None = None
) -> dict[str, Any]:
    """Plays `episodes` episodes, `envs` at a time, each of at most `max_episode_steps` steps (the run's).

    Episode i begins with the seed 10,000 + `seed` + i, whatever `envs` is.
    """
    environment = policy.make_environment(envs, seed)
    try:
        actor = policy.make_actor(envs, seed)
        limit = max_episode_steps or policy.config.evaluation_limit
        observers = make_observers(policy.config)
        loop = EnvironmentLoop(
            environment, actor, observers=observers, should_update=False, max_episode_steps=limit
        )
        played = policy.agent.play(loop, actor.policy, episodes)
        seeded = find_inside(environment, SeededEpisodes)
    finally:
        environment.close()
    each = played["episode_return"]
    # With several agents, the return of an episode is the mean of theirs.
    returns = [float(value) for value in np.mean(tree.flatten(each), axis=0)]
    agents = {name: float(np.mean(each[name])) for name in each} if isinstance(each, dict) else {}
    return {
        **({"agents": agents} if agents else {}),
        "episodes": len(returns),
        **({"cut_episodes": loop.num_cut} if loop.num_cut else {}),
        "step": policy.step,
        "checkpoint": policy.checkpoint.name,
        "best": policy.is_best,
        "seed": seed,
        # The first and the last seed; null if the environment takes none.
        "episode_seeds": [seeded.first, seeded.first + episodes - 1] if seeded and seeded.is_seeded else None,
        "mean": statistics.fmean(returns),
        "standard_deviation": statistics.pstdev(returns),
        "minimum": min(returns),
        "maximum": max(returns),
        "mean_length": statistics.fmean(played["episode_length"].tolist()),
        "returns": returns,
        **{f"mean_{name}": float(played[name].mean()) for name in played if name not in _NAMES},
    }
