"""Env steps per second of whole actors under each way of inference, beside each other.

    python -m benchmarks.programs.inference [--seconds 4] [--actors 2] [--envs 8] [--hidden 64]
        [--environment gymnasium:CartPole-v1] [--step-ms 0] [--device cpu] [--modes local server ...]
    python -m benchmarks.programs.inference --slow   # steps of 5 ms and a large network: alternating pays

Actors act with IMPALA's network and throw their experience away: no replay, no learner, so that what is
measured is acting alone. ``--step-ms`` puts a wait without CPU into each environment's step, as a simulator
elsewhere would (an actor's environments step one after another): alternating pays where there is something to
wait for. The figure is taken between two looks at the program's counter, when all actors are at work.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import threading
import time
from typing import Any

import launch
from agents.impala import IMPALA, IMPALAConfig
from framework.programs import RunConfig, make_program

MODES = ("local", "server", "alternating+server")
SLOW = {"actors": 1, "envs": 4, "step_ms": 5.0, "hidden": 2048}


class ActsOnly(IMPALA):
    """IMPALA without tables: its actors store nothing, and no learner runs."""

    def make_tables(self, spec: Any) -> list[Any]:
        return []


class Waits:
    """A batched environment whose step takes ``seconds`` longer for each env, which cost no CPU."""

    def __init__(self, environment: Any, seconds: float):
        self._environment, self._seconds = environment, seconds
        self._never = threading.Event()

    def step(self, action: Any) -> Any:
        self._never.wait(self._seconds * self._environment.num_envs)
        return self._environment.step(action)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


class WaitingActsOnly(ActsOnly):
    """The same, in environments that take their time."""

    def __init__(self, config: IMPALAConfig, seconds: float):
        super().__init__(config)
        self._seconds = seconds

    def environment_wrappers(self) -> Any:
        return [*super().environment_wrappers(), functools.partial(Waits, seconds=self._seconds)]


def measure(mode: str, options: argparse.Namespace) -> float:
    """Env steps per second of all actors together."""
    config = IMPALAConfig(hidden_sizes=(options.hidden, options.hidden))
    seconds = options.step_ms / 1000
    agent = WaitingActsOnly(config, seconds) if seconds else ActsOnly(config)
    program = make_program(
        agent,
        options.environment,
        RunConfig(
            num_actors=options.actors,
            envs_per_actor=options.envs,
            evaluate_period=None,
            inference=mode,
            inference_device=options.device,
            inference_timeout=options.timeout_ms / 1000,
            log_period=1_000_000,
        ),
    )
    with launch.start(program, engine="processes") as job:
        counter = job.client("counter")
        warm = 200 * options.actors * options.envs
        counter.wait_for("env_steps", warm, timeout=120)

        def count() -> tuple[int, float]:
            """The next count and when it came, since actors report many steps at once."""
            counter.wait_for("env_steps", counter.get_counts()["env_steps"] + 1, timeout=60)
            return counter.get_counts()["env_steps"], time.perf_counter()

        before, started = count()
        # A count that is not reached: the wait ends with its time.
        counter.wait_for("env_steps", 10**12, timeout=options.seconds)
        after, ended = count()
        job.stop()
    return (after - before) / (ended - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--environment", default="gymnasium:CartPole-v1")
    parser.add_argument("--hidden", type=int, default=64, help="units in each of two layers")
    parser.add_argument("--step-ms", type=float, default=0.0, help="wait in each env step, without CPU")
    parser.add_argument("--device", default="cpu", help="of the inference server")
    parser.add_argument("--timeout-ms", type=float, default=1.0, help="of its batches")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--json", type=pathlib.Path, default=None)
    parser.add_argument("--slow", action="store_true", help=f"other defaults: {SLOW}")
    if parser.parse_args().slow:
        parser.set_defaults(**SLOW)
    options = parser.parse_args()
    print(f"{options.environment}, {options.actors} actors x {options.envs} envs", flush=True)
    rows = []
    for mode in options.modes:
        rate = measure(mode, options)
        rows.append({"mode": mode, "steps_per_second": rate})
        print(f"  {mode:20} {rate:10,.0f} steps/s   {rate / rows[0]['steps_per_second']:5.2f}", flush=True)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"options": {**vars(options), "json": None}, "rows": rows}, indent=2)
        )


if __name__ == "__main__":
    main()
