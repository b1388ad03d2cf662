"""The settings of a program, in one dataclass for every reader.

`make_program`, the workers in the nodes, the flags of `repertory train`, the presets and `docs/programs.md`
read `RunConfig`. A new option is a field here and the line of code that uses it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any, Literal

from framework import config_checks
from launch.engines.options import Resources

Inference = Literal["local", "server", "alternating+server"]
ReplayBackend = Literal["repertory", "reverb"]
Stepping = Literal["auto", "inline", "vector", "processes"]

_MAY_BE_0 = ("seed", "variable_sources", "inference_timeout")  # Other counts are at least 1.


@dataclasses.dataclass(frozen=True)
class RunConfig(config_checks.NamedFields):
    """The settings of a program: its nodes, its length and its output.

    Raises:
      ValueError: A field has a wrong type or value, or contradicts another field. The text names the field.
    """

    # Folder of metrics and checkpoints. make_program continues the run that is in it, with its settings and
    # perhaps new limits; repertory train does so with --resume instead. None: repertory train makes one in
    # runs/, and make_program writes no files.
    directory: str | None = None
    # Seed of all random numbers. On the serial engine the same seed gives the same run, bit for bit.
    seed: int = 0
    # RUN or RUN:CHECKPOINT: the folder of a run, and latest, best, previous or a step of it. A new run begins
    # with its parameters and statistics, but with a new optimizer and replay, and no steps. The settings may
    # be others, and so may the environment, if its specs are equal.
    init: str | None = None

    # Folder of episodes from which an off-policy agent learns, without actors. See framework.datasets.files.
    dataset: str | None = None

    num_actors: int = 1  # Actor nodes. More collect faster while cores are free.
    # Training continues with this many actors while others are lost or not started yet. None needs all.
    min_actors: int | None = None
    # Seconds with fewer actors than `min_actors` after which the run fails.
    min_actors_timeout: float = 300.0
    envs_per_actor: int = 1  # Environments that each actor steps as one batch.
    num_learners: int = 1  # Learner nodes, each with its shard of every batch. Over 1 needs processes or ray.
    replay_shards: int = 1  # Replay servers, each with an equal part of the items and of the actors.
    # Nodes that serve the parameters to actors and evaluators instead of the learner. One for each machine
    # with actors relieves the learner's machine. 0 makes none.
    variable_sources: int = 0
    stepping: Stepping = "auto"  # How an actor steps its envs. See `environments.make`.
    # Keyword arguments of the environment, such as frame_skip=4 sticky_actions=0 life_loss_terminates=true.
    environment_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Overrides of environment_options in evaluations. Without any, evaluations play whole games: options that
    # end an episode at a lost life are off.
    evaluation_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Options of gymnasium's reset(options=...), at each reset.
    reset_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Numbers in gymnasium's info that become metrics of each episode, such as is_success.
    info_metrics: tuple[str, ...] = ()
    # Wrappers of the environment, innermost first; the agent's own go around them. Names such as
    # "StepLimit(limit=200)", or module:object.
    wrappers: tuple[str, ...] = ()

    # By group of nodes, fields of `launch.Resources`, such as learner.num_gpus=1 or actor.threads=2.
    resources: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    # Torch threads of the learner. None is OMP_NUM_THREADS or 1, and on the serial engine one for each 50,000
    # parameters of its networks, up to the number of cores.
    learner_threads: int | None = None

    # Where actions come from. local: each actor has the policy. server: one node acts for all actors.
    # alternating+server: an actor steps one half of its envs while the node acts for the other half.
    inference: Inference = "local"
    inference_nodes: int = 1  # Inference nodes, each of which acts for an equal part of the actors.
    inference_device: str = "cpu"  # Device of the inference nodes.
    inference_max_batch: int | None = None  # Largest batch of envs in one step of the policy. None: all.
    inference_timeout: float = 0.001  # Seconds the first env of a batch waits for others.

    max_env_steps: int | None = None  # Exact number of env steps of all actors together. None: no limit.
    max_learner_steps: int | None = None  # Learner steps. None: no limit.
    target_return: float | None = None  # Ends the program when an evaluation's mean return reaches it.

    # Env steps between two evaluations. auto: 5,000, or a tenth of max_env_steps where that is less.
    # None makes no evaluator. With a dataset, these and all other env steps are learner steps.
    evaluate_period: Literal["auto"] | int | None = "auto"
    num_evaluation_episodes: int = 20  # Episodes of one evaluation, played greedily.
    # The most environments that an evaluation, and repertory eval, has at once. None: one for each episode.
    evaluation_envs: int | None = None
    # Steps after which an evaluation cuts an open episode: its return is these steps'.
    # Games of Atari have up to 27,000, at four frames a step. None: 10,000, or max_env_steps where that is
    # less, but no less than 1,000.
    max_evaluation_steps: int | None = None
    # Learner steps between two versions of the parameters that actors can pull. With a max_policy_lag
    # (PPO), 1.
    publish_period: int = 10
    # Steps of an actor with all its envs between two requests for newer parameters. With a max_policy_lag
    # (PPO), actors ask before each unroll instead.
    update_period: int = 10
    log_period: int = 1_000  # Env steps of one actor between two of its rows of metrics.
    learner_log_period: int = 500  # Learner steps between two rows of the learner.
    # In addition to metrics.jsonl in `directory`: csv, tensorboard, wandb, terminal, or module:object.
    loggers: tuple[str, ...] = ()
    # Observers, such as ActionObserver, whose metrics of every episode join the rows; or module:object.
    observers: tuple[str, ...] = ()

    # Env steps between two checkpoints. None: only checkpoint_minutes.
    checkpoint_period: int | None = 50_000
    # Minutes between two checkpoints, if that is sooner than checkpoint_period. None: only that period.
    checkpoint_minutes: float | None = 5.0
    keep_checkpoints: int = 3  # Number of checkpoints kept. The end of a run always writes one.
    replay_backend: ReplayBackend = "repertory"  # Implementation of the tables. reverb is dm-reverb.

    def __post_init__(self) -> None:
        refuse = functools.partial(config_checks.refuse, self)
        config_checks.types(self)
        if self.directory == "":
            refuse("directory", ", expected a path or None. '.' is the current folder.")
        if self.init is not None:
            object.__setattr__(self, "init", os.path.abspath(os.path.expanduser(self.init)))
        if self.dataset is not None and (":" not in self.dataset or os.path.exists(self.dataset)):
            object.__setattr__(self, "dataset", os.path.abspath(os.path.expanduser(self.dataset)))
        if self.directory is not None:
            path = os.path.abspath(os.path.expanduser(self.directory))
            object.__setattr__(self, "directory", path)
            if path.encode("utf-8", "replace") != os.fsencode(path):  # Torch writes no file there.
                refuse("directory", ", expected a name in UTF-8. Rename or move the folder.")
        counts = [each.name for each in dataclasses.fields(self) if str(each.type).startswith("int")]
        config_checks.at_least(self, 1, *(name for name in counts if name not in _MAY_BE_0))
        config_checks.at_least(self, 0, *_MAY_BE_0)
        if self.evaluate_period != "auto":
            config_checks.at_least(self, 1, "evaluate_period")
        config_checks.above(self, 0, "checkpoint_minutes", "min_actors_timeout")
        config_checks.device(self, "inference_device")
        known = [field.name for field in dataclasses.fields(Resources)]
        for group, fields in self.resources.items():
            config_checks.names(f"resources: {group}", fields, known)
            with config_checks.RaisedAs(
                ValueError, (TypeError, ValueError), f"resources of group {group!r}: "
            ):
                Resources(**fields)
        if self.dataset is not None and self.max_env_steps is not None:
            refuse("max_env_steps", " with a dataset, expected None: nothing acts. Give max_learner_steps.")
        if self.target_return is not None and self.evaluate_period is None:
            refuse("target_return", " without an evaluator, expected None. Give evaluate_period (env steps).")
        if self.min_actors is not None:
            config_checks.ordered(self, "min_actors", "num_actors")
        for field, does in (("replay_shards", "writes to"), ("inference_nodes", "uses")):
            if self.num_actors % getattr(self, field):
                why = f"since each actor {does} one of them."
                refuse(field, f", expected a divisor of num_actors ({self.num_actors}), {why}")
        if self.replay_shards > 1 and self.replay_backend != "repertory":
            backend = f" with replay_backend {self.replay_backend!r}"
            refuse("replay_shards", f"{backend}, expected 1. Use the back end 'repertory'.")
        if self.inference == "alternating+server" and self.envs_per_actor < 2:
            why = f"since inference {self.inference!r} divides an actor's envs in two."
            refuse("envs_per_actor", f", expected at least 2, {why}")
        if self.inference_nodes > 1 and self.inference == "local":
            refuse("inference_nodes", " with inference 'local', expected 1. Use inference 'server'.")

    def decided(self, recorded: Mapping[str, Any]) -> RunConfig:
        """The settings with an `evaluate_period` in place of "auto".

        Args:
          recorded: the settings of a run that goes on; empty for a new one.
        """
        if self.evaluate_period != "auto":
            return self
        period = recorded.get("evaluate_period", shorter_period(5_000, self.steps))
        return dataclasses.replace(self, evaluate_period=period)

    @property
    def num_envs(self) -> int:
        """Environments of the whole program."""
        return self.num_actors * self.envs_per_actor

    @property
    def steps(self) -> int | None:
        """The limit of what the program counts: env steps, or learner steps with a dataset."""
        return self.max_env_steps if self.dataset is None else self.max_learner_steps

    @property
    def num_evaluation_envs(self) -> int:
        """Environments that an evaluation has at once."""
        return min(self.num_evaluation_episodes, self.evaluation_envs or self.num_evaluation_episodes)

    @property
    def evaluation_limit(self) -> int:
        """Steps after which an evaluation cuts an episode."""
        if self.max_evaluation_steps is not None:
            return self.max_evaluation_steps
        # The evaluations of a short run of an environment without an end would take most of its time.
        return min(10_000, max(1_000, self.max_env_steps or 10_000))

    @property
    def limits(self) -> dict[str, Any]:
        """What ends the run, by the names of the fields."""
        return {name: getattr(self, name) for name in ("max_env_steps", "max_learner_steps", "target_return")}


def shorter_period(period: int, env_steps: int | None) -> int:
    """The period, or a shorter one with which a run of `env_steps` has ten evaluations."""
    return period if env_steps is None else min(period, max(1, env_steps // 10))
