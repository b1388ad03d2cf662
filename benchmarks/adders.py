"""Transitions per CPU-second into embedded replay: our adders beside the replay buffers that are installed.

    python benchmarks/adders.py [--seconds 0.5] [--lanes 1 8 64 256]

Ours does the whole way of an environment step: time step and action in, n-step maths, rows and items in a
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
from common import measure

from framework import adders, replay

CAPACITY = 100_000
EPISODE = 200
FIRST, MID, LAST = dm_env.StepType.FIRST, dm_env.StepType.MID, dm_env.StepType.LAST

# A contender: the number of lanes to a function that adds one step of all lanes, or None if it cannot.
Contender = Callable[[int], "Callable[[], object] | None"]


def timesteps(lanes: int) -> Iterator[dm_env.TimeStep]:
    """Endless time steps; lanes end out of phase and begin again after their LAST step."""
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(64, lanes, 4)).astype(np.float32)
    phase = np.arange(lanes) * EPISODE // lanes
    ages = np.arange(EPISODE + 1)[:, None] + phase
    kinds = np.where(ages % (EPISODE + 1) == 0, 0, np.where(ages % (EPISODE + 1) == EPISODE, 2, 1))
    steps = []
    for t, kind in enumerate(kinds):
        observation = observations[t % 64]
        discount = (kind != 2).astype(np.float32)
        if lanes == 1:
            step = dm_env.TimeStep(dm_env.StepType(kind[0]), 1.0, float(discount[0]), observation[0])
        else:
            step = dm_env.TimeStep(kind, np.ones(lanes, np.float32), discount, observation)
        steps.append(step)
    while True:
        yield from steps


def ours(make: Callable[[replay.EmbeddedClient], adders.Adder], max_size: int = CAPACITY) -> Contender:
    """A contender from what makes an adder."""

    def contender(lanes: int) -> Callable[[], object]:
        table = replay.Table(
            adders.DEFAULT_TABLE,
            replay.selectors.Uniform(),
            replay.selectors.Fifo(),
            max_size,
            replay.rate_limiters.MinSize(1),
        )
        adder = make(replay.EmbeddedClient([table]))
        steps = timesteps(lanes)
        first = next(steps)
        adder.add_first(first if lanes == 1 else first._replace(step_type=np.zeros(lanes, np.int64)))
        action = 1 if lanes == 1 else np.ones(lanes, np.int64)
        return lambda: adder.add(action, next(steps))

    return contender


def stable_baselines3(lanes: int) -> Callable[[], object]:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    box = spaces.Box(-9, 9, (4,), np.float32)
    buffer = ReplayBuffer(CAPACITY, box, spaces.Discrete(2), device="cpu", n_envs=lanes)
    observation = np.zeros((lanes, 4), np.float32)
    row = np.zeros(lanes, np.float32)
    action = np.zeros((lanes, 1), np.int64)
    infos: list[dict] = [{} for _ in range(lanes)]
    return lambda: buffer.add(observation, observation, action, row, row, infos)


def tianshou(lanes: int) -> Callable[[], object]:
    from tianshou.data import Batch, VectorReplayBuffer

    buffer = VectorReplayBuffer(CAPACITY, lanes)
    observation = np.zeros((lanes, 4), np.float32)
    row, flag = np.zeros(lanes, np.float32), np.zeros(lanes, bool)
    batch = Batch(
        obs=observation, act=row, rew=row, terminated=flag, truncated=flag, obs_next=observation, info={}
    )
    return lambda: buffer.add(batch)


def torchrl(lanes: int) -> Callable[[], object]:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    buffer = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    names = ("observation", "next_observation")
    data = TensorDict({name: torch.zeros(lanes, 4) for name in names}, batch_size=[lanes])
    for name in ("action", "reward", "done"):
        data[name] = torch.zeros(lanes)
    return lambda: buffer.extend(data)


def cpprb(lanes: int) -> Callable[[], object]:
    from cpprb import ReplayBuffer

    one = {"shape": ()}
    vector = {"shape": (4,)}
    buffer = ReplayBuffer(CAPACITY, {"obs": vector, "act": one, "rew": one, "next_obs": vector, "done": one})
    observation, row = np.zeros((lanes, 4), np.float32), np.zeros(lanes, np.float32)
    return lambda: buffer.add(obs=observation, act=row, rew=row, next_obs=observation, done=row)


def dm_reverb(lanes: int) -> Callable[[], object] | None:
    import reverb

    if lanes != 1:
        return None  # a writer has one lane
    table = reverb.Table(
        "t", reverb.selectors.Uniform(), reverb.selectors.Fifo(), CAPACITY, reverb.rate_limiters.MinSize(1)
    )
    server = reverb.Server([table], port=None)
    writer = reverb.Client(f"localhost:{server.port}").trajectory_writer(2)
    row = {"observation": np.zeros(4, np.float32), "action": np.int64(1), "reward": np.float32(1)}

    def add(server: object = server) -> None:  # the default keeps the server alive
        writer.append(row)
        if writer.episode_steps > 1:
            writer.create_item("t", 1.0, {name: column[-2:] for name, column in writer.history.items()})
            writer.flush(5)

    return add


CONTENDERS: dict[str, Contender] = {
    "n-step adder, n = 1": ours(lambda client: adders.NStepTransitionAdder(client, 1, 0.99)),
    "n-step adder, n = 3": ours(lambda client: adders.NStepTransitionAdder(client, 3, 0.99)),
    "sequence adder, 80 rows, period 40": ours(
        lambda client: adders.SequenceAdder(client, 80, 40), max_size=CAPACITY // 40
    ),
    "episode adder": ours(
        lambda client: adders.EpisodeAdder(client, EPISODE + 1), max_size=CAPACITY // EPISODE
    ),
    "Stable-Baselines3 ReplayBuffer": stable_baselines3,
    "Tianshou VectorReplayBuffer": tianshou,
    "TorchRL ReplayBuffer": torchrl,
    "cpprb ReplayBuffer": cpprb,
    "dm-reverb TrajectoryWriter": dm_reverb,
}


def rate(add: Callable[[], object], lanes: int, seconds: float) -> float:
    """Transitions per CPU-second, the best of three runs after the table was filled once."""
    started = time.process_time()
    for _ in range(2 * CAPACITY // lanes):
        add()
        if time.process_time() - started > 4 * seconds:
            break
    return measure(add, lanes, seconds).cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="CPU seconds of one run")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 8, 64, 256])
    arguments = parser.parse_args()
    print(f"{'transitions per CPU-second':<36}" + "".join(f"{n:>8} lanes" for n in arguments.lanes))
    for name, contender in CONTENDERS.items():
        cells = []
        try:
            for lanes in arguments.lanes:
                add = contender(lanes)
                cells.append("-" if add is None else f"{rate(add, lanes, arguments.seconds):,.0f}")
        except ImportError as error:
            cells = [f"not installed ({error.name})"]
        print(f"{name:<36}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
