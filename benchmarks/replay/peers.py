"""What ``compare.py`` measures of other libraries. Each is imported when it is measured."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.common import Rate, rss
from benchmarks.replay.ours import BATCH, CAPACITY, Run, answer, measure_clients

_BLOCK = 4096
os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # TorchRL reports every buffer it makes


class StableBaselines3:
    """Its buffer is filled one step of all envs at a time."""

    @staticmethod
    def _buffer(size: int, shape: Sequence[int], dtype: str, envs: int) -> Any:
        from gymnasium import spaces
        from stable_baselines3.common.buffers import ReplayBuffer

        low, high = (0, 255) if dtype == "uint8" else (-9, 9)
        box = spaces.Box(low, high, tuple(shape), np.dtype(dtype).type)
        buffer = ReplayBuffer(size, box, spaces.Discrete(2), device="cpu", n_envs=envs)
        return buffer

    @classmethod
    def batch_writer(cls, envs: int) -> Run:
        buffer = cls._buffer(CAPACITY, (4,), "float32", envs)
        observation, row = np.zeros((envs, 4), np.float32), np.zeros(envs, np.float32)
        action, infos = np.zeros((envs, 1), np.int64), [{} for _ in range(envs)]
        return Run(lambda: buffer.add(observation, observation, action, row, row, infos), envs)

    @classmethod
    def uniform(cls, shape: Sequence[int], dtype: str, size: int) -> Run:
        buffer = cls._buffer(size, shape, dtype, 1)
        for array in (buffer.observations, buffer.next_observations, buffer.rewards, buffer.actions):
            array.fill(1)  # touched memory, as after writing
        buffer.full = True
        return Run(lambda: buffer.sample(BATCH), BATCH)


class Tianshou:
    """Filled one step of all envs at a time."""

    FILLS_FAST = False

    @staticmethod
    def _step(envs: int, shape: Sequence[int], dtype: str) -> Any:
        from tianshou.data import Batch

        observation = np.ones((envs, *shape), dtype)
        row, flag = np.zeros(envs, np.float32), np.zeros(envs, bool)
        return Batch(
            obs=observation, act=row, rew=row, terminated=flag, truncated=flag, obs_next=observation, info={}
        )

    @classmethod
    def batch_writer(cls, envs: int) -> Run:
        from tianshou.data import VectorReplayBuffer

        buffer, step = VectorReplayBuffer(CAPACITY, envs), cls._step(envs, (4,), "float32")
        return Run(lambda: buffer.add(step), envs)

    @classmethod
    def _filled(cls, buffer: Any, size: int, shape: Sequence[int], dtype: str, envs: int) -> Any:
        step = cls._step(envs, shape, dtype)
        for _ in range(size // envs):
            buffer.add(step)
        return buffer

    @classmethod
    def uniform(cls, shape: Sequence[int], dtype: str, size: int) -> Run:
        from tianshou.data import VectorReplayBuffer

        buffer = cls._filled(VectorReplayBuffer(size, 10), size, shape, dtype, 10)
        return Run(lambda: buffer.sample(BATCH), BATCH)

    @classmethod
    def prioritized(cls, size: int) -> Run:
        from tianshou.data import PrioritizedVectorReplayBuffer

        buffer = PrioritizedVectorReplayBuffer(size, 10, alpha=0.6, beta=0.4)
        cls._filled(buffer, size, (4,), "float32", 10)
        fresh = np.random.default_rng(0).random(BATCH) + 0.01

        def call() -> None:
            _, index = buffer.sample(BATCH)
            buffer.update_weight(index, fresh)

        return Run(call, BATCH)


class TorchRL:
    FILLS_FAST = True

    @staticmethod
    def _data(n: int, shape: Sequence[int], dtype: str) -> Any:
        import torch
        from tensordict import TensorDict

        kind = getattr(torch, dtype)
        data = TensorDict({name: torch.ones(n, *shape, dtype=kind) for name in ("o", "next_o")}, [n])
        for name in ("action", "reward", "done"):
            data[name] = torch.zeros(n)
        return data

    @classmethod
    def _filled(cls, buffer: Any, size: int, shape: Sequence[int], dtype: str) -> Any:
        block = max(1, min(_BLOCK, (64 << 20) // int(np.prod(shape))))
        for begin in range(0, size, block):
            buffer.extend(cls._data(min(block, size - begin), shape, dtype))
        return buffer

    @classmethod
    def batch_writer(cls, envs: int) -> Run:
        from torchrl.data import LazyTensorStorage, ReplayBuffer

        buffer, data = ReplayBuffer(storage=LazyTensorStorage(CAPACITY)), cls._data(envs, (4,), "float32")
        return Run(lambda: buffer.extend(data), envs)

    @classmethod
    def uniform(cls, shape: Sequence[int], dtype: str, size: int) -> Run:
        from torchrl.data import LazyTensorStorage, ReplayBuffer

        buffer = ReplayBuffer(storage=LazyTensorStorage(size), batch_size=BATCH)
        cls._filled(buffer, size, shape, dtype)
        return Run(buffer.sample, BATCH)

    @classmethod
    def prioritized(cls, size: int) -> Run:
        import torch
        from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=LazyTensorStorage(size), batch_size=BATCH
        )
        cls._filled(buffer, size, (4,), "float32")
        fresh = torch.rand(BATCH) + 0.01

        def call() -> None:
            index = buffer.sample()["index"]
            buffer.update_priority(index, fresh)

        return Run(call, BATCH)


class Cpprb:
    FILLS_FAST = True

    @staticmethod
    def _columns(shape: Sequence[int], dtype: str) -> dict:
        one, vector = {"shape": 1}, {"shape": tuple(shape), "dtype": np.dtype(dtype).type}
        return {"obs": vector, "act": one, "rew": one, "next_obs": vector, "done": one}

    @staticmethod
    def _fill(buffer: Any, size: int, shape: Sequence[int], dtype: str) -> Any:
        block = max(1, min(_BLOCK, (64 << 20) // int(np.prod(shape))))
        for begin in range(0, size, block):
            n = min(block, size - begin)
            observation, row = np.ones((n, *shape), dtype), np.zeros(n, np.float32)
            buffer.add(obs=observation, act=row, rew=row, next_obs=observation, done=row)
        return buffer

    @classmethod
    def batch_writer(cls, envs: int) -> Run:
        from cpprb import ReplayBuffer

        buffer = ReplayBuffer(CAPACITY, cls._columns((4,), "float32"))
        observation, row = np.zeros((envs, 4), np.float32), np.zeros(envs, np.float32)
        return Run(
            lambda: buffer.add(obs=observation, act=row, rew=row, next_obs=observation, done=row), envs
        )

    @classmethod
    def uniform(cls, shape: Sequence[int], dtype: str, size: int) -> Run:
        from cpprb import ReplayBuffer

        buffer = cls._fill(ReplayBuffer(size, cls._columns(shape, dtype)), size, shape, dtype)
        return Run(lambda: buffer.sample(BATCH), BATCH)

    @classmethod
    def prioritized(cls, size: int) -> Run:
        from cpprb import PrioritizedReplayBuffer

        buffer = PrioritizedReplayBuffer(size, cls._columns((4,), "float32"), alpha=0.6)
        cls._fill(buffer, size, (4,), "float32")
        fresh = np.random.default_rng(0).random(BATCH) + 0.01

        def call() -> None:
            sample = buffer.sample(BATCH, 0.4)
            buffer.update_priorities(sample["indexes"], fresh)

        return Run(call, BATCH)


BUFFERS: dict[str, Any] = {
    "Stable-Baselines3": StableBaselines3,
    "Tianshou": Tianshou,
    "TorchRL": TorchRL,
    "cpprb": Cpprb,
}


# dm-reverb: a server, and writers and datasets that talk to it.


def _table(size: int) -> Any:
    import reverb
    import tensorflow as tf

    signature = {
        "observation": tf.TensorSpec([2, 4], tf.float32),
        "action": tf.TensorSpec([2], tf.int64),
        "reward": tf.TensorSpec([2], tf.float32),
    }
    return reverb.Table(
        "t",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        size,
        reverb.rate_limiters.MinSize(1),
        signature=signature,
    )


_ROW = {"observation": np.zeros(4, np.float32), "action": np.int64(1), "reward": np.float32(1)}


def _adder(writer: Any) -> Any:
    def add() -> None:
        writer.append(_ROW)
        if writer.episode_steps > 1:
            writer.create_item("t", 1.0, {name: column[-2:] for name, column in writer.history.items()})
            writer.flush(20)

    return add


def reverb_writer(steps: int) -> Run:
    """Server and writer in one process, which is dm-reverb's fastest way in."""
    import reverb

    server = reverb.Server([_table(CAPACITY)], port=None)
    add = _adder(reverb.Client(f"localhost:{server.port}").trajectory_writer(steps))
    return Run(add, 1, server.stop)


def _serve(pipe: Any) -> None:
    import reverb

    server = reverb.Server([_table(CAPACITY)], port=None)
    add = _adder(server.localhost_client().trajectory_writer(2))
    for _ in range(10_000):
        add()
    pipe.send(server.port)
    pipe.recv()
    server.stop()


def _use(pipe: Any, kind: str, port: int, number: int) -> None:
    import reverb

    if kind == "insert":
        add = _adder(reverb.Client(f"localhost:{port}").trajectory_writer(2))
        answer(pipe, lambda: [add() for _ in range(BATCH)], BATCH)
        return
    dataset = reverb.TrajectoryDataset.from_table_signature(f"localhost:{port}", "t", 2 * BATCH)
    batches = dataset.batch(BATCH).as_numpy_iterator()
    answer(pipe, lambda: next(batches), BATCH)


class ReverbServed:
    """A server in a process of its own; writers or ``TrajectoryDataset``s in others."""

    def __init__(self, kind: str, clients: int):
        import reverb  # noqa: F401

        self._context = multiprocessing.get_context("spawn")
        self._pipe, theirs = self._context.Pipe()
        self._server = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        self._server.start()
        theirs.close()
        self._arguments = (kind, self._pipe.recv())
        self._clients = clients

    def measure(self, seconds: float) -> Rate:
        return measure_clients(
            self._context, _use, self._arguments, self._clients, seconds, [self._server.pid]
        )

    def close(self) -> None:
        self._pipe.send(None)
        self._server.join(30)


def reverb_checkpoint(megabytes: int) -> Run:
    """Random frames of 28 kB; the unit is MB."""
    import reverb

    folder = tempfile.mkdtemp(prefix="replay-benchmark-")
    size = megabytes * 1_000_000 // (84 * 84 * 4)
    table = reverb.Table(
        "t", reverb.selectors.Uniform(), reverb.selectors.Fifo(), size, reverb.rate_limiters.MinSize(1)
    )
    server = reverb.Server([table], port=None, checkpointer=reverb.checkpointers.DefaultCheckpointer(folder))
    client = server.localhost_client()
    rng = np.random.default_rng(0)
    with client.trajectory_writer(1) as writer:
        for _ in range(size):
            writer.append({"observation": rng.integers(0, 255, (4, 84, 84), np.uint8)})
            writer.create_item("t", 1.0, {"observation": writer.history["observation"][-1:]})
            writer.flush(20)
        writer.flush()

    def close() -> None:
        server.stop()
        shutil.rmtree(folder)

    return Run(client.checkpoint, megabytes, close, runs=1)


def reverb_memory() -> str:
    """Each item two steps of float32[4], neighbours sharing them."""
    import reverb

    server = reverb.Server([_table(CAPACITY)], port=None)
    writer = reverb.Client(f"localhost:{server.port}").trajectory_writer(2)
    add = _adder(writer)
    for _ in range(2):
        add()
    before = rss()
    for _ in range(10_000):
        add()
    writer.flush()
    return f"{(rss() - before) / 10_000:,.0f} ({sum(np.asarray(v).nbytes for v in _ROW.values())} of data)"
