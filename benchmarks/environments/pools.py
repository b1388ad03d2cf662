"""Env steps per second of EnvPool, and of the same environments through gymnasium and ale-py.

python -m benchmarks.environments.pools

CPU seconds are those of all threads of this process. With them, other programs on the machine do not count.
"""

from __future__ import annotations

import time
import warnings

import numpy as np

from framework import environments

# Both ways: no sticky actions, 4 frames of 84 x 84, frame skip 4, no-op starts up to 30.
ATARI = {"sticky_actions": 0.0}
CASES = [
    ("envpool:Pong-v5", 64, "auto", {}),
    ("atari:Pong", 64, "inline", ATARI),
    ("envpool:Pong-v5", 1600, "auto", {}),
    ("envpool:CartPole-v1", 1600, "auto", {}),
    ("gymnasium:CartPole-v1", 1600, "vector", {}),
    ("gymnasium:CartPole-v1", 1600, "inline", {}),
]


def steps_per_second(
    name: str, num_envs: int, stepping: str, options: dict, seconds: float = 2.0
) -> tuple[float, float]:
    """With random actions for at least `seconds`: env steps per second, and per CPU second."""
    made_of = {"num_envs": num_envs, "stepping": stepping, "options": options}
    with environments.make(name, seed=1, **made_of) as environment:
        rng = np.random.default_rng(0)
        actions = rng.integers(0, environment.action_spec().num_values, (16, num_envs))
        environment.reset()
        environment.step(actions[0])
        made, start, cpu = 0, time.perf_counter(), time.process_time()
        while made == 0 or time.perf_counter() - start < seconds:
            environment.step(actions[made % 16])
            made += 1
        steps = made * num_envs
        return steps / (time.perf_counter() - start), steps / (time.process_time() - cpu)


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"{'environment':24}{'envs':>6}  {'stepping':10}{'env steps/s':>14}{'per CPU s':>14}")
    for name, num_envs, stepping, options in CASES:
        try:
            speed = "".join(f"{each:14,.0f}" for each in steps_per_second(name, num_envs, stepping, options))
        except ImportError as error:
            speed = f"  {error}"
        print(f"{name:24}{num_envs:6}  {stepping:10}{speed}")


if __name__ == "__main__":
    main()
