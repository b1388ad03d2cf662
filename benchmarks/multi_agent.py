"""PPO and DQN trained together on four CartPoles: combined throughput against the times of its parts.

    python benchmarks/multi_agent.py [--steps 12000]

The parts are sampling (of all agents), the learner steps of PPO, and those of DQN. On the serial engine, one
thread makes all of them, so their times allow 1 / (sample + ppo + dqn) env steps per second. What the plan,
the counter and the rows cost comes on top. Times are CPU seconds, so that other programs on the machine do
not count.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import launch
from agents.ppo_dqn import PPODQN, PPODQNConfig
from framework.flow import Flow, Node
from framework.programs import MultiAgentWorker, PlanLearner, RunConfig, make_program

WARM_UP = 100  # Items of the plan before the clock starts: until both policies learn.


def timed(log: Path, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds a line with the CPU seconds of each call to a file: nodes do not share objects."""

    def call(*args: Any) -> Any:
        start = time.process_time()
        result = function(*args)
        with log.open("a") as file:
            file.write(f"{part} {start} {time.process_time()}\n")
        return result

    return call


class TimedWorker(MultiAgentWorker):
    def __init__(self, setup: Any, **options: Any):
        super().__init__(setup, **options)
        self._log_file = setup.agent.log

    def _collect(self, steps: int) -> None:
        timed(self._log_file, "sample", super()._collect)(steps)


class TimedAgent(PPODQN):
    worker_class = TimedWorker

    def __init__(self, config: PPODQNConfig, log: Path):
        super().__init__(config)
        self.log = log

    def steps(self, learner: PlanLearner) -> dict[str, Any]:
        return {name: timed(self.log, name, step) for name, step in super().steps(learner).items()}

    def plan(self, workers: Sequence[Node], learner: PlanLearner) -> Flow:
        return super().plan(workers, learner).map(timed(self.log, "item", lambda item: item))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=12_000)
    steps = parser.parse_args().steps
    run = RunConfig(envs_per_actor=8, max_env_steps=steps, evaluate_period=None, learner_log_period=200)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "times"
        agent = TimedAgent(PPODQNConfig(), log)
        launch.launch(make_program(agent, "multi_agent:CartPole", run), engine="serial")
        lines = [line.split() for line in log.read_text().splitlines()]
    items = [float(end) for part, _, end in lines if part == "item"]
    begin, end = items[WARM_UP], items[-1]
    spent: collections.Counter[str] = collections.Counter()
    rounds = 0
    for part, first, last in lines:
        if begin <= float(first) and float(last) <= end and part != "item":
            spent[part] += float(last) - float(first)
            rounds += part == "sample"
    made = rounds * run.envs_per_actor * agent.unroll_length
    each = ", ".join(f"{name} {spent[name] / made * 1e6:.0f}" for name in ("sample", "ppo", "dqn"))
    print(f"CPU us per env step: {each}; all {(end - begin) / made * 1e6:.0f}")
    allowed, reached = made / sum(spent.values()), made / (end - begin)
    print(f"{reached:,.0f} env steps per CPU second of {allowed:,.0f} allowed: {reached / allowed:.2f}")


if __name__ == "__main__":
    main()
