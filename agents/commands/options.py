"""The settings of a run, which are the flags of ``repertory train``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True)
class RunOptions:
    """Where and how long the agent trains."""

    environment: str = "gymnasium:CartPole-v1"  # Or dm_control:DOMAIN/TASK, atari:GAME, minatar:GAME.
    engine: str = "processes"  # What runs the program: serial, threads, processes, ray, launchpad.
    directory: str | None = None  # Folder of the run; by default a new one under runs/.
    seed: int = 0  # Of everything; with --engine serial the same seed gives the same run.

    restarts: int = 0  # How often each node may fail and be made anew before the run ends with its error.

    num_actors: int = 2  # Actor nodes; more collect faster while cores are free.
    envs_per_actor: int = 4  # Environments that each env steps as one batch.
    num_learners: int = 1  # Learner nodes, each with its shard of every batch; more need engine processes.
    stepping: str = "auto"  # How an env steps its envs: auto, inline, vector, processes.

    inference: str = "local"  # Where actions come from: local, server, alternating, alternating+server.
    inference_device: str = "cpu"  # Of the inference node.
    inference_min_batch: int = 1  # Envs that it acts for once the timeout has passed.
    inference_max_batch: int | None = None  # Envs that it acts for at once; None is all.
    inference_timeout: float = 0.001  # Seconds that the first env of a batch waits for others.
    inference_messages: bool = False  # Its arrays travel in messages, even where there is shared memory.

    max_env_steps: int | None = 100_000  # Env steps of all actors together; exact.
    max_learner_steps: int | None = None  # Learner steps; None is no limit.
    target_return: float | None = None  # End when the greedy mean return reaches this.

    evaluate_period: int | None = 5_000  # Env steps between evaluations; None for none.
    num_evaluation_episodes: int = 20  # Episodes of one evaluation.
    checkpoint_period: int | None = 50_000  # Env steps between checkpoints, beside the last one.
    keep_checkpoints: int = 3  # How many checkpoints stay.
    publish_period: int = 10  # Learner steps between versions of the parameters that actors can pull.
    log_period: int = 1_000  # Env steps of an actor between its rows of metrics.
    learner_log_period: int = 500  # Learner steps between its rows of metrics.
    replay: Literal["repertory", "reverb"] = "repertory"  # What serves the tables; reverb is dm-reverb.

    csv: bool = False  # Also write metrics.csv.
    tensorboard: bool = False  # Also write TensorBoard events to tensorboard/.


# Not arguments of make_program: what runs it, and what is shown and written beside it.
_OF_THE_COMMAND = ("environment", "engine", "restarts", "replay", "csv", "tensorboard")
_REPLAY_MODULES = {"repertory": "framework.replay", "reverb": "framework.replay.dm_reverb"}


def program_arguments(options: RunOptions) -> dict[str, Any]:
    """The keyword arguments of ``framework.programs.make_program``."""
    arguments = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if field.name not in _OF_THE_COMMAND
    }
    return {**arguments, "replay_backend": _REPLAY_MODULES[options.replay]}
