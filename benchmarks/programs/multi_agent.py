"""PPO and DQN trained together on four CartPoles: combined throughput against the times of its parts.

    python -m benchmarks.programs.multi_agent [--engine serial] [--steps 12000]

The parts are sampling (of all agents), the learner steps of PPO, and those of DQN.

On `serial` one thread makes all of them, so their times allow 1 / (sample + ppo + dqn) env steps per second.
Times are CPU seconds, so that other programs on the machine do not count.

On `processes` a round of PPO is sampling and then its learner step, and one learner makes the steps of both
policies. The times of the parts allow 1 / max(sample + ppo, ppo + dqn) env steps per second. Times are those
of the clock in the same run, so that parts that share cores with each other, or with other programs, take as
long in the one as in the other. Sampling includes waits for room in replay, learner steps no wait for each
other.

What the plan, the counter and the rows cost comes on top.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launch
from agents.ppo_dqn import PPODQN, PPODQNConfig
from framework.multi_agent import MultiAgentLearner
from framework.programs import MultiAgentWorker, RunConfig, make_program
from framework.workers.worker import Setup

WARM_UP = 3  # Learner steps of PPO before the clock starts: until both policies learn.


class Log:
    """A file with a line for each call of a part: nodes do not share objects."""

    def __init__(self, path: Path, in_cpu_seconds: bool):
        self.path, self.in_cpu_seconds = path, in_cpu_seconds

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.process_time if self.in_cpu_seconds else time.perf_counter

        def call(*args: Any) -> Any:
            start = clock()
            result = function(*args)
            with self.path.open("a") as file:
                file.write(f"{part} {start} {clock()}\n")
            return result

        return call


class TimedWorker(MultiAgentWorker):
    def __init__(self, setup: Setup, **options: Any):
        super().__init__(setup, **options)
        assert isinstance(setup.agent, TimedAgent)
        self._collect = setup.agent.log.timed("sample", self._collect)  # type: ignore[method-assign]


class TimedAgent(PPODQN):
    worker_class = TimedWorker

    def __init__(self, config: PPODQNConfig, log: Log):
        super().__init__(config)
        self.log = log

    def make_learner(self, networks: Any, spec: Any) -> MultiAgentLearner:
        learner: Any = super().make_learner(networks, spec)
        steps = {name: self.log.timed(name, learner.step) for name in self.parts}
        learner.step = lambda batch: steps[next(iter(batch.data))](batch)
        return learner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engine", default="serial", choices=("serial", "processes"))
    parser.add_argument("--steps", type=int, default=12_000)
    options = parser.parse_args()
    run = RunConfig(
        envs_per_actor=8, max_env_steps=options.steps, evaluate_period=None, learner_log_period=200
    )
    is_serial = options.engine == "serial"
    with tempfile.TemporaryDirectory() as folder:
        log = Log(Path(folder) / "times", in_cpu_seconds=is_serial)
        agent = TimedAgent(PPODQNConfig(), log)
        launch.launch(make_program(agent, "multi_agent:CartPole", run), engine=options.engine)
        lines = [line.split() for line in log.path.read_text().splitlines()]
    rounds = [float(end) for part, _, end in lines if part == "ppo"][WARM_UP:]
    begin, end = rounds[0], rounds[-1]
    spent: collections.Counter[str] = collections.Counter()
    for part, first, last in lines:
        if begin <= float(first) and float(last) <= end:
            spent[part] += float(last) - float(first)
    made = (len(rounds) - 1) * run.envs_per_actor * agent.unroll_length
    each = ", ".join(f"{name} {spent[name] / made * 1e6:.0f}" for name in ("sample", "ppo", "dqn"))
    second = "CPU second" if is_serial else "second"
    print(f"{second}s / 1e6 per env step: {each}; all {(end - begin) / made * 1e6:.0f}")
    needed = spent["ppo"] + (sum if is_serial else max)([spent["sample"], spent["dqn"]])
    allowed, reached = made / needed, made / (end - begin)
    print(
        f"{options.engine}: {reached:,.0f} env steps per {second} of {allowed:,.0f} allowed: "
        f"{reached / allowed:.2f}"
    )


if __name__ == "__main__":
    main()
