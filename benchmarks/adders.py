"""Transitions per CPU-second into embedded replay: our adders beside the replay buffers that are installed.

    python benchmarks/adders.py [--seconds 0.5] [--envs 1 8 64 256]

Ours does the whole way of an env step: time step and action in, n-step maths, rows and items in a
full table of 100,000 items (so each item also evicts one). Buffers of other libraries get arrays that are
ready to be stored, which is the least they can be asked. Observations are float32[4]. Each figure is the best
of three runs; ratios within one table are worth more than the figures, which move with the machine's load.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import dm_env
import numpy as np
import replay_peers
from common import measure

from framework import adders, replay

CAPACITY = 100_000
EPISODE = 200
FIRST, MID, LAST = dm_env.StepType.FIRST, dm_env.StepType.MID, dm_env.StepType.LAST

# A contender: the number of envs to a function that adds one step of all envs, or None if it cannot.
Contender = Callable[[int], "Callable[[], object] | None"]


def timesteps(envs: int) -> Iterator[dm_env.TimeStep]:
    """Endless time steps; envs end out of phase and begin again after their LAST step."""
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(64, envs, 4)).astype(np.float32)
    phase = np.arange(envs) * EPISODE // envs
    ages = np.arange(EPISODE + 1)[:, None] + phase
    kinds = np.where(ages % (EPISODE + 1) == 0, 0, np.where(ages % (EPISODE + 1) == EPISODE, 2, 1))
    steps = []
    for t, kind in enumerate(kinds):
        observation = observations[t % 64]
        discount = (kind != 2).astype(np.float32)
        if envs == 1:
            step = dm_env.TimeStep(dm_env.StepType(kind[0]), 1.0, float(discount[0]), observation[0])
        else:
            step = dm_env.TimeStep(kind, np.ones(envs, np.float32), discount, observation)
        steps.append(step)
    while True:
        yield from steps


def ours(make: Callable[[replay.EmbeddedClient], adders.Adder], max_size: int = CAPACITY) -> Contender:
    """A contender from what makes an adder."""

    def contender(envs: int) -> Callable[[], object]:
        table = replay.Table(
            adders.REPLAY_TABLE,
            replay.selectors.Uniform(),
            replay.selectors.Fifo(),
            max_size,
            replay.rate_limiters.MinSize(1),
        )
        adder = make(replay.EmbeddedClient([table]))
        steps = timesteps(envs)
        first = next(steps)
        adder.add_first(first if envs == 1 else first._replace(step_type=np.zeros(envs, np.int64)))
        action = 1 if envs == 1 else np.ones(envs, np.int64)
        return lambda: adder.add(action, next(steps))

    return contender


def peer(name: str) -> Contender:
    """The buffer of another library."""

    def contender(envs: int) -> Callable[[], object]:
        return replay_peers.BUFFERS[name].batch_writer(envs).call

    return contender


def dm_reverb(envs: int) -> Callable[[], object] | None:
    if envs != 1:
        return None  # A writer has one env.
    run = replay_peers.reverb_writer(2)
    return lambda: run.call()  # Keeps the run, which has the server.


CONTENDERS: dict[str, Contender] = {
    "n-step adder, n = 1": ours(lambda client: adders.NStepTransitionAdder(client, 1, 0.99)),
    "n-step adder, n = 3": ours(lambda client: adders.NStepTransitionAdder(client, 3, 0.99)),
    "sequence adder, 80 rows, period 40": ours(
        lambda client: adders.SequenceAdder(client, 80, 40), max_size=CAPACITY // 40
    ),
    "episode adder": ours(
        lambda client: adders.EpisodeAdder(client, EPISODE + 1), max_size=CAPACITY // EPISODE
    ),
    "Stable-Baselines3 ReplayBuffer": peer("Stable-Baselines3"),
    "Tianshou VectorReplayBuffer": peer("Tianshou"),
    "TorchRL ReplayBuffer": peer("TorchRL"),
    "cpprb ReplayBuffer": peer("cpprb"),
    "dm-reverb TrajectoryWriter": dm_reverb,
}


def rate(add: Callable[[], object], envs: int, seconds: float) -> float:
    """Transitions per CPU-second, the best of three runs after the table was filled once."""
    started = time.process_time()
    for _ in range(2 * CAPACITY // envs):
        add()
        if time.process_time() - started > 4 * seconds:
            break
    return measure(add, envs, seconds).cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="CPU seconds of one run")
    parser.add_argument("--envs", type=int, nargs="+", default=[1, 8, 64, 256])
    arguments = parser.parse_args()
    print(f"{'transitions per CPU-second':<36}" + "".join(f"{n:>8} envs" for n in arguments.envs))
    for name, contender in CONTENDERS.items():
        cells = []
        try:
            for envs in arguments.envs:
                add = contender(envs)
                cells.append("-" if add is None else f"{rate(add, envs, arguments.seconds):,.0f}")
        except ImportError as error:
            cells = [f"not installed ({error.name})"]
        print(f"{name:<36}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
