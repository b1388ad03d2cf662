"""Environment steps per second of whole programs: acting, replay, learning, evaluation off.

    python benchmarks/throughput.py [--steps 40000] [--agents ppo dqn] [--engines serial processes]

A row is one program on CartPole-v1 with its preset, from the first step to the last, start-up not counted.
Stable-Baselines3's PPO and DQN run beside it where it is installed. CPU seconds are those of all processes.
Figures of one run can be compared with each other; across runs the machine's load changes them.
"""

from __future__ import annotations

import argparse
import functools
import resource
import time
from typing import Any


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def ours(name: str, engine: str, steps: int) -> dict[str, Any]:
    """Runs the preset of an agent; times from the moment that the first steps were counted."""
    import agents
    import launch
    from agents import presets
    from framework.programs import make_program

    environment = "gymnasium:CartPole-v1"
    preset = presets.find(name, environment)
    kinds = {"num_actors", "lanes_per_actor", "publish_every", "stepping"}
    run = {key: value for key, value in preset.run.items() if key in kinds}
    agent = agents.make(name, **preset.agent)
    program = make_program(
        agent, environment, **run, max_actor_steps=steps, evaluate_every=None, log_every=10**9
    )
    before, started = cpu_seconds(), None
    with launch.start(program, engine) as job:
        while started is None and engine != "serial":
            counts = job.client("counter").wait_for("actor_steps", 1, timeout=60)
            started = time.perf_counter() if counts else None
        started = started or time.perf_counter()
        job.wait()
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "cpu": cpu_seconds() - before, "steps": steps}


def stable_baselines3(name: str, steps: int) -> dict[str, Any] | None:
    """The same steps with Stable-Baselines3's Zoo settings; None where it is not installed."""
    try:
        import stable_baselines3 as sb3
        from stable_baselines3.common.env_util import make_vec_env
    except ImportError:
        return None
    from learning import PEERS

    kind, _, settings, lanes = PEERS[f"cartpole-{name}"]
    model = getattr(sb3, kind)("MlpPolicy", make_vec_env("CartPole-v1", lanes), device="cpu", **settings)
    before, started = cpu_seconds(), time.perf_counter()
    model.learn(steps)
    return {"seconds": time.perf_counter() - started, "cpu": cpu_seconds() - before, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--agents", nargs="+", default=["ppo", "impala", "dqn"])
    parser.add_argument("--engines", nargs="+", default=["serial", "processes"])
    options = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for name in options.agents:
        for engine in options.engines:
            rows[f"{name}, {engine}"] = functools.partial(ours, name, engine, options.steps)
        if name in ("ppo", "dqn"):
            rows[f"{name}, Stable-Baselines3"] = functools.partial(stable_baselines3, name, options.steps)
    print("| program | steps/s | steps per CPU-second |\n|---|---|---|")
    for label, measure in rows.items():
        result = measure()
        if result is None:
            print(f"| {label} | not installed | |", flush=True)
            continue
        made = result["steps"]
        print(f"| {label} | {made / result['seconds']:,.0f} | {made / result['cpu']:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
