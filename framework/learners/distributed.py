"""Learning in several processes, each with a shard of every batch. Gradients are averaged.

```python
store = torch.distributed.FileStore(path, size)               # or a CallStore
group = LearnerGroup(rank, size, store, learner.device)       # in each process; waits for the others
learner.distribute(group)
while True:
    learner.step(shard)                                     # in all of them, the same number of times
group.close()
```

All learners begin with the same parameters, optimizer state and step count (`learner.restore(first.save())`).
They apply the same averaged gradients, so their states stay equal.
"""

from __future__ import annotations

import datetime
import os
import uuid
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

LOOPBACK = "127.0.0.1"
EXCHANGE_TIMEOUT_S = 180.0  # A first step may compile.


class CallStore(dist.Store):
    """A store whose operations are calls of `call(operation, *arguments)`, in any process.

    The operations are `set(key, value)`, `get(key, timeout_s)`, `wait(keys, timeout_s)`, `check(keys)` and
    `add(key, amount, call_id)`, with values as bytes. `call` may carry out an operation twice if a repeated
    `add` with the same `call_id` returns the same value. An error that `call` raises ends the operation that
    uses the store.
    """

    def __init__(self, call: Callable[..., Any], timeout_s: float = EXCHANGE_TIMEOUT_S):
        super().__init__()
        self._call, self._timeout_s = call, timeout_s

    def set(self, key: str, value: Any) -> None:
        self._call("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        value: bytes = self._call("get", key, self._timeout_s)
        return value

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self._call("wait", keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return bool(self._call("check", keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount, uuid.uuid4().hex))

    def clone(self) -> CallStore:
        return self


class LearnerGroup:
    """The membership of one process in the learners of a program.

    The constructor waits until all learners have joined, and raises after `timeout_s`. Tensors travel with
    gloo on the CPU and NCCL on GPUs, one GPU for each learner. They are not encrypted, and anyone who can
    reach the address can disturb them, so use a private network.

    Args:
      rank: rank of this learner, 0 to `size - 1`.
      size: number of learners.
      store: the store through which the learners exchange their addresses.
      device: device of the learner, which determines the backend.
      timeout_s: seconds that one exchange may take, including the wait for the slowest learner's step.
      address: IP address of this process's machine that all others can reach. The group listens on its
        network interface only, unless `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` names another.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        device: str | torch.device = "cpu",
        timeout_s: float = EXCHANGE_TIMEOUT_S,
        address: str = LOOPBACK,
    ):
        if not 0 <= rank < size:
            raise ValueError(f"rank: got {rank}, expected 0 to {size - 1}.")
        self.rank, self.size = rank, size
        self._modules: list[nn.Module] = []
        self.device = torch.device(device)
        timeout = datetime.timedelta(seconds=timeout_s)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        if backend == "nccl":  # NCCL's watchdog must not call a store of Python.
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
            if self.device.index is not None:
                torch.cuda.set_device(self.device)
        # By default, gloo uses the address of the machine's host name. Another group may need another one.
        variable = f"{backend.upper()}_SOCKET_IFNAME"
        self._variable = None if variable in os.environ else variable
        if self._variable is not None:
            os.environ[variable] = interface_of(address)
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        except BaseException:
            self.close()
            raise

    def averaged(
        self, networks: nn.Module, loss_fn: Callable[..., Any], partial_gradients: bool = False
    ) -> Callable[..., Any]:
        """`loss_fn(networks, batch, context)` whose backward pass averages gradients over the group.

        Each call copies the buffers of the networks from rank 0. With `partial_gradients`, the loss may leave
        out some parameters at some steps, the same in all learners.
        """
        module = nn.parallel.DistributedDataParallel(
            _Loss(networks, loss_fn, self), find_unused_parameters=partial_gradients
        )
        self._modules.append(module)
        return lambda networks, batch, context: module(batch, context)

    def counts(self, *mine: int) -> list[list[int]]:
        """The numbers `mine` of all learners, by rank. All learners must pass the same number of them."""
        table = torch.zeros((self.size, len(mine)), dtype=torch.int64, device=self.device)
        table[self.rank] = torch.tensor(mine)
        return self.total(table).tolist()

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all learners' tensors, of equal shape and dtype, as a new tensor."""
        summed = tensor.detach().clone()
        dist.all_reduce(summed)
        return summed

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of all learners' tensors, of equal shape and dtype, as a new tensor."""
        maximum = tensor.detach().clone()
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        return maximum

    def close(self) -> None:
        """Leaves the group. A learner that still waits for this one gets an error. Frees averaged losses."""
        # If a reducer held the last reference to the group, its destructor would join the group's thread
        # while holding the interpreter's lock, which the thread may need for its last tensors: PyTorch issue
        # 56297.
        for module in self._modules:
            del module.reducer, module.logger
        self._modules.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._variable is not None:
            os.environ.pop(self._variable, None)


def interface_of(address: str) -> str:
    """The name of this machine's network interface that has the IP address `address`."""
    found = psutil.net_if_addrs()
    for name, entries in found.items():
        if any(entry.address.partition("%")[0] == address.strip("[]") for entry in entries):
            return name
    raise ValueError(
        f"address: got {address!r}, expected an IP address of this machine, which has {sorted(found)}. Name "
        "the interface of the learners' network in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
    )


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exchange ended with `error` because another learner has gone or does not answer."""
    # gloo has no class for its errors, but each names the file of gloo that raised it.
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


class _Loss(nn.Module):
    """A loss function as a module, which is what DistributedDataParallel takes."""

    def __init__(self, networks: nn.Module, loss_fn: Callable[..., Any], group: LearnerGroup):
        super().__init__()
        self.networks = networks
        self._loss_fn = loss_fn
        self._group = group

    def forward(self, batch: Any, context: Any) -> Any:
        output = self._loss_fn(self.networks, batch, context)
        if output.weight is not None:
            # Gradients are averaged with equal weights, so a loss over more elements is scaled up here.
            weight = output.weight.detach().float()
            share = weight * self._group.size / self._group.total(weight).clamp(min=1e-8)
            output = output._replace(loss=output.loss * share)
        # Metrics are detached: no learner may wait for the gradient of a parameter that only a metric uses.
        return output._replace(metrics={name: value.detach() for name, value in output.metrics.items()})
