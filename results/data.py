"""Data sets that this repository's agents make, from seeds.

    python -m results.data [TASK-KIND …] [--out data] [--seed 1]

Each is a folder of episodes for ``repertory train --dataset``, at most 20 MB. One is skipped if it is there.
For a task of TASKS and a kind of KINDS, a run on the serial engine with one torch thread is recorded:

    expert          the best policy of a run that ends at the task's `expert` return, or after its `steps`
    medium          the same, with `medium`, which is 42 of 100 points between `random` and `expert`
    mixed           the run of `expert`: its best policy, its last one and random actions, in turns
    medium-replay   the run of `medium`: what its actors did, as its replay has it at the end
    full-replay     the run of `expert`: the same

100 episodes each, but for replays, in compressed files. Where a policy plays, one action in ten is random,
as policies that are deterministic leave nothing to choose from. So a data set's mean return is below that of
its policy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned where.

    Attributes:
      agent: learns it.
      environment: the environment.
      random: the return of random actions, 0 points.
      expert: the return that makes 100 points.
      steps: env steps after which a run ends at the latest.
      replay: env steps that the replay holds, so that a data set of it has 20 MB at most.
      period: env steps between two evaluations, which may end the run.
      flags: further flags of the run.
    """

    agent: str
    environment: str
    random: float
    expert: float
    steps: int
    replay: int
    period: int
    flags: tuple[str, ...] = ()

    @property
    def medium(self) -> float:
        """The return that makes 42 points, as D4RL's policies of this name have in HalfCheetah."""
        return self.random + 0.42 * (self.expert - self.random)


# The returns of HalfCheetah and Hopper are D4RL's references (Fu et al., 2020). The others are those of
# random actions and of the agent's preset.
TASKS = {
    "breakout": Task("dqn", "minatar:Breakout", 0.5, 17, 1_000_000, 200_000, 10_000),
    # The preset's learner step for every 5 env steps carries few runs to their goal with items of one step.
    "cartpole": Task(
        *("dqn", "gymnasium:CartPole-v1", 22, 500, 50_000, 50_000, 500), flags=("--samples-per-insert", "64")
    ),
    "halfcheetah": Task("sac", "gymnasium:HalfCheetah-v5", -280, 12_135, 1_000_000, 100_000, 5_000),
    # TD3 as Fujimoto et al. (2018) run it. SAC's seed 1 was still below 450 after 100,000 steps.
    "hopper": Task(
        *("td3", "gymnasium:Hopper-v5", -20, 3_234, 1_000_000, 150_000, 5_000),
        flags=(
            *("--batch-size", "256", "--samples-per-insert", "256", "--learning-rate-decay", "None"),
            *("--exploration-std", "0.1", "--exploration-correlation", "0", "--no-layer-norm"),
        ),
    ),
    # A learner step for every 8 env steps. With one for each, the replay has 2,600 steps at medium.
    "pendulum": Task(
        *("sac", "gymnasium:Pendulum-v1", -1_230, -150, 50_000, 50_000, 500),
        flags=("--samples-per-insert", "16"),
    ),
}
# By kind, whose run it is of, and what is recorded.
KINDS = {
    "expert": ("expert", "best"),
    "full-replay": ("expert", "replay"),
    "medium": ("medium", "best"),
    "medium-replay": ("medium", "replay"),
    "mixed": ("expert", "mixed"),
}
NAMES = [f"{task}-{kind}" for task in TASKS for kind in KINDS]


def repertory(*arguments: object) -> None:
    """Runs a command, whose output goes on."""
    command = [sys.executable, "-m", "framework.commands", *map(str, arguments)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def make(name: str, folder: pathlib.Path, seed: int = 1) -> pathlib.Path:
    """Makes a data set, and the run that it is of, unless they are there. Returns its path.

    Raises:
      SystemExit: The run did not reach its goal, so its policy is not what the set's name says.
    """
    path = folder / name
    if path.exists():
        return path
    of_task, _, kind = name.partition("-")
    task, (goal, policy) = TASKS[of_task], KINDS[kind]
    run = folder / "runs" / f"{of_task}-{goal}"
    if not (run / "result.json").exists():
        begun = ("--resume", run) if run.exists() else (task.agent, "--directory", run)
        flags = ("--environment", task.environment, "--engine", "serial", "--seed", seed)
        limits = ("--max-env-steps", task.steps, "--target-return", round(getattr(task, goal), 1))
        replay = ("--n-step", 1, "--max-replay-size", task.replay, "--evaluate-period", task.period)
        repertory("train", *begun, *(() if run.exists() else (*flags, *limits, *replay, *task.flags)))
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    if result["reason"] != "target_return":
        asked = f"expected {getattr(task, goal):.1f}: give another --seed, and --out"
        raise SystemExit(f"{run} ended with a return of {result['episode_return']:.1f}, {asked}")
    noise = () if policy == "replay" else ("--noise", 0.1)
    repertory("record", run, "--policy", policy, *noise, "--seed", seed, "--compress", "--output", path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="TASK-KIND", help=", ".join(NAMES))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("data"))
    parser.add_argument("--seed", type=int, default=1, help="of run, episodes and random actions")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(NAMES)):
        parser.error(f"no data set {unknown}; they are {NAMES}")
    for name in options.names:
        print(f"{name}: {make(name, options.out, options.seed)}", flush=True)


if __name__ == "__main__":
    main()
