"""Trains on one machine of a Slurm cluster with submitit, or here with its local executor.

    pip install "repertory[slurm]"
    python examples/cluster/slurm_submitit.py --runs /shared/runs
    python examples/cluster/slurm_submitit.py --runs runs --cluster local --max-env-steps 5000

`--runs` is a folder that every machine mounts. When Slurm preempts a job or its time is over, submitit puts
it back into the queue. It then continues from the last checkpoint in the same folder.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import submitit

import launch
from agents.dqn import DQN, DQNConfig
from framework.programs import RunConfig, make_program


class Train(submitit.helpers.Checkpointable):
    """A run that submitit may submit again with the same arguments: `directory` holds its checkpoints."""

    def __call__(self, directory: str, seed: int, max_env_steps: int) -> dict[str, Any]:
        config = RunConfig(directory=directory, seed=seed, num_actors=2, max_env_steps=max_env_steps)
        program = make_program(DQN(DQNConfig()), "gymnasium:CartPole-v1", config)
        result: dict[str, Any] = launch.launch(program, engine="processes")
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=pathlib.Path, required=True, help="a folder that all machines mount")
    parser.add_argument("--cluster", default="slurm", choices=["slurm", "local"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--max-env-steps", type=int, default=50_000)
    options = parser.parse_args()
    runs = options.runs.absolute()
    executor = submitit.AutoExecutor(folder=runs / "submitit", cluster=options.cluster)
    executor.update_parameters(name="repertory", cpus_per_task=4, timeout_min=60)
    jobs = [
        executor.submit(Train(), str(runs / f"dqn-{seed}"), seed, options.max_env_steps)
        for seed in options.seeds
    ]
    for seed, job in zip(options.seeds, jobs, strict=True):
        print(f"seed {seed}, job {job.job_id}: {job.result()}", flush=True)


if __name__ == "__main__":
    main()
