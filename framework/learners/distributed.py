"""Learning in several processes, each with a shard of every batch. Gradients are averaged.

```python
store = host_store(size)                                    # in the process of rank 0
group = LearnerGroup(rank, size, store.port, learner.device)  # in each process; waits for the others
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
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_LOOPBACK = "127.0.0.1"


def host_store(num_learners: int, timeout_s: float = 60.0) -> dist.TCPStore:
    """Makes the store through which the learners connect, on a free loopback port. Rank 0 keeps it."""
    # Without a listening socket, the store listens on all interfaces, whatever host it is given.
    listener = socket.create_server((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        _LOOPBACK,
        port,
        num_learners,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # The store closes it.
    )


class LearnerGroup:
    """The membership of one process in the learners of a program, all on one machine.

    The constructor waits until all learners have joined, and raises after `timeout_s`. Data goes over
    loopback, with gloo on the CPU and NCCL on GPUs, one GPU for each learner.

    Args:
      rank: rank of this learner, 0 to `size - 1`.
      size: number of learners.
      port: port of the store from `host_store`.
      device: device of the learner, which determines the backend.
      timeout_s: seconds that one exchange may take, including the wait for the slowest learner's step.
    """

    def __init__(
        self, rank: int, size: int, port: int, device: str | torch.device = "cpu", timeout_s: float = 300.0
    ):
        if not 0 <= rank < size:
            raise ValueError(f"rank: got {rank}, expected 0 to {size - 1}.")
        self.rank, self.size = rank, size
        self._modules: list[nn.Module] = []
        self.device = torch.device(device)
        # Without it, gloo uses the address of the machine's host name, which other machines may reach.
        interface = "lo0" if sys.platform == "darwin" else "lo"
        timeout = datetime.timedelta(seconds=timeout_s)
        store = dist.TCPStore(_LOOPBACK, port, size, is_master=False, timeout=timeout)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        os.environ.setdefault(f"{backend.upper()}_SOCKET_IFNAME", interface)
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)

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
