"""Learner steps per CPU-second of agents that learn from data, beside d3rlpy's.

    python -m benchmarks.offline --peers d3rlpy=PYTHON

PYTHON is an interpreter with d3rlpy; see ``constraints/d3rlpy.txt``. Both learn from the same files of random
actions, with batches of 256 items, two hidden layers of 256, two critics, and one thread. A figure is that of
``--steps`` learner steps of a whole program or ``fit``, without what comes before: the difference of a long
and a short run. Rounds of the two take turns, and the median of each is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
AGENTS = ("bc", "td3_bc", "iql", "cql", "rebrac")
SHORT = 100  # Learner steps of the short run.
SIZES, BATCH = (256, 256), 256


def record(path: pathlib.Path, environment: str, episodes: int) -> None:
    """Writes episodes of random actions."""
    import numpy as np

    from framework import environments
    from framework.datasets import record, write_episodes

    made, random = environments.make(environment, num_envs=1, seed=0), np.random.default_rng(0)
    actions: Any = made.action_spec()
    low, high = actions.minimum, actions.maximum
    act = lambda observation: random.uniform(low, high, (1, *actions.shape)).astype(np.float32)  # noqa: E731
    write_episodes(path, record(made, act, episodes), spec=made.spec)


def ours(agent: str, path: pathlib.Path, step_mode: str = "eager") -> Callable[[int], None]:
    """A whole program on the serial engine."""
    import launch
    from framework.programs import RunConfig, make_agent, make_program

    made = make_agent(agent, hidden_sizes=SIZES, batch_size=BATCH, step_mode=step_mode)

    def run(steps: int) -> None:
        config = RunConfig(dataset=str(path), max_learner_steps=steps, evaluate_period=None, seed=1)
        launch.launch(make_program(made, None, config), engine="serial")

    return run


def d3rlpy(agent: str, path: pathlib.Path) -> Callable[[int], None]:
    """d3rlpy's ``fit``, without rows and without progress."""
    import logging

    import numpy as np
    import structlog
    from d3rlpy import algos, constants, dataset, models
    from d3rlpy import logging as rows

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    episodes = []
    for shard in sorted(path.glob("episodes-*.npz")):
        arrays, at = dict(np.load(shard)), 0
        for number, length in enumerate(arrays["lengths"]):
            taken = slice(at, at + length)
            episodes.append(
                dataset.Episode(
                    # An episode has one observation more than it has actions.
                    arrays["observation"][at + number : at + number + length],
                    arrays["action"][taken],
                    arrays["reward"][taken, None],
                    terminated=bool(arrays["discount"][at + length - 1] == 0),
                )
            )
            at += length
    encoder, normalized = (
        models.VectorEncoderFactory(list(SIZES), use_layer_norm=norm) for norm in (False, True)
    )
    both = {"batch_size": BATCH, "actor_encoder_factory": encoder, "critic_encoder_factory": encoder}
    config: Any = {
        "bc": lambda: algos.BCConfig(batch_size=BATCH, encoder_factory=encoder),
        "td3_bc": lambda: algos.TD3PlusBCConfig(**both),
        "iql": lambda: algos.IQLConfig(**both, value_encoder_factory=encoder),
        "cql": lambda: algos.CQLConfig(**both, alpha_learning_rate=0.0),
        "rebrac": lambda: algos.ReBRACConfig(**{**both, "critic_encoder_factory": normalized}),
    }[agent]()
    buffer = dataset.ReplayBuffer(
        dataset.InfiniteBuffer(), episodes=episodes, action_space=constants.ActionSpace.CONTINUOUS
    )

    def run(steps: int) -> None:
        config.create(device=False).fit(
            buffer,
            n_steps=steps,
            n_steps_per_epoch=steps,
            logger_adapter=rows.NoopAdapterFactory(),
            show_progress=False,
        )

    return run


SIDES: dict[str, Callable[..., Callable[[int], None]]] = {"ours": ours, "d3rlpy": d3rlpy}


def measure(side: str, agent: str, path: pathlib.Path, steps: int, options: dict[str, str]) -> float:
    """Learner steps per CPU-second, in this process."""
    import torch

    torch.set_num_threads(1)
    run = SIDES[side](agent, path, **options)
    run(SHORT)
    spent = []
    for count in (SHORT, SHORT + steps):
        begin = time.process_time()
        run(count)
        spent.append(time.process_time() - begin)
    return steps / (spent[1] - spent[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("agents", nargs="*", default=AGENTS)
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--environment", default="gymnasium:Pendulum-v1")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-mode", default="eager", help="of ours")
    parser.add_argument("--side", nargs=2, help="one figure, in this process: SIDE DATA")
    options = parser.parse_args()
    if options.side:
        side, path = options.side
        given = {"step_mode": options.step_mode} if side == "ours" else {}
        print(json.dumps(measure(side, options.agents[0], pathlib.Path(path), options.steps, given)))
        return
    pythons = {"ours": sys.executable} | dict(each.split("=", 1) for each in options.peers)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        record(pathlib.Path(folder) / "data", options.environment, 50)
        print("agent      " + "".join(f"{name:>10}" for name in pythons) + "   ours / peer")
        for agent in options.agents:
            found: dict[str, list[float]] = {name: [] for name in pythons}
            for _ in range(options.rounds):
                for name, python in pythons.items():
                    command = [python, "-m", "benchmarks.offline", agent, "--side", name, f"{folder}/data"]
                    command += ["--steps", str(options.steps), "--step-mode", options.step_mode]
                    done = subprocess.run(
                        command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE
                    )
                    found[name].append(json.loads(done.stdout.splitlines()[-1]))
            medians = {name: statistics.median(each) for name, each in found.items()}
            ratios = [f"{medians['ours'] / medians[name]:.2f}" for name in pythons if name != "ours"]
            print(f"{agent:11}" + "".join(f"{each:10.1f}" for each in medians.values()), "  ", *ratios)


if __name__ == "__main__":
    main()
