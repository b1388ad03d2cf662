"""How long a program takes from ``launch`` until every actor acts: 1 learner, 1 replay, 4 actors, processes.

    python -m benchmarks.programs.startup [--actors 4] [--runs 3]

DQN on CartPole-v1. Each environment writes down when its first step was made. Prints a line for each run:
seconds from the call of ``launch.start`` until the first and the last actor have stepped, and from a stop
until the program was over and cleaned up. The first line is how long the imports took before that, torch's
among them.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from pathlib import Path
from typing import Any

BEGIN = time.monotonic()

import gymnasium  # noqa: E402

import launch  # noqa: E402
from agents.dqn import DQN, DQNConfig  # noqa: E402
from framework.programs import RunConfig, make_program  # noqa: E402

PATIENCE = 120.0


class FirstStep(gymnasium.Wrapper):
    """Leaves a file with the time when it is first stepped."""

    def __init__(self, folder: str) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._folder: str | None = folder

    def step(self, action: Any) -> Any:
        if self._folder is not None:
            node = launch.get_node_context().label
            Path(self._folder, node).write_text(repr(time.monotonic()))
            self._folder = None
        return super().step(action)


def run(actors: int) -> tuple[float, float, float]:
    """Seconds until the first actor, the last actor, and from the stop to the end."""
    with tempfile.TemporaryDirectory() as folder:
        environment = functools.partial(FirstStep, folder)
        program = make_program(
            DQN(DQNConfig()), environment, RunConfig(num_actors=actors, evaluate_period=None)
        )
        begin = time.monotonic()
        with launch.start(program) as job:
            waiting = time.monotonic() + PATIENCE
            while len(steps := list(Path(folder).glob("actor-*"))) < actors:
                if job.over or time.monotonic() > waiting:
                    raise RuntimeError(f"only {[step.name for step in steps]} have stepped")
                job.outcome.over.wait(0.1)
            times = [float(step.read_text()) - begin for step in steps]
            stop = time.monotonic()
            job.stop()
            job.wait(timeout=PATIENCE)
            return min(times), max(times), time.monotonic() - stop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    print(f"imports: {time.monotonic() - BEGIN:.1f} s")
    print(f"{'first actor':>12}{'last actor':>12}{'stop to end':>13}   (s)")
    for _ in range(arguments.runs):
        first, last, end = run(arguments.actors)
        print(f"{first:12.1f}{last:12.1f}{end:13.1f}")


if __name__ == "__main__":
    main()
