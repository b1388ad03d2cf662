"""Learning in several processes: each has a shard of every batch, and their gradients are averaged.

```python
store = host_store(size)                                    # in the process of rank 0
group = LearnerGroup(rank, size, store.port, learner.device)  # in each process; waits for the others
learner.distribute(group)
while True:
    learner.step(shard)                                     # in all of them, the same number of times
group.close()
```

All begin with the same parameters, optimizer and count of steps (`learner.restore(first.save())`) and, as
they apply the same averaged gradients, stay the same.
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
    """Where the learners find each other: a store on a free loopback port; rank 0 keeps it."""
    # Left to itself the store listens on all interfaces, whatever host it is given.
    listener = socket.create_server((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        _LOOPBACK,
        port,
        num_learners,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )


class LearnerGroup:
    """One process's place among the learners of a program, which are on one machine.

    Making it waits until all are there; making one ends in an error after `timeout_s`. Data goes over
    loopback, with gloo on the CPU and NCCL on GPUs, one GPU for each learner.

    Args:
      rank: 0 to `size - 1`.
      size: how many learners.
      port: of `host_store`.
      device: of the learner; tells the backend.
      timeout_s: seconds that one exchange may take, the wait for the slowest learner's step included.
    """

    def __init__(
        self, rank: int, size: int, port: int, device: str | torch.device = "cpu", timeout_s: float = 300.0
    ):
        if not 0 <= rank < size:
            raise ValueError(f"rank: got {rank}, expected 0 to {size - 1}.")
        self.rank, self.size = rank, size
        self._modules: list[nn.Module] = []
        self.device = torch.device(device)
        # Without it the address that the machine's name stands for is used, which others may reach.
        interface = "lo0" if sys.platform == "darwin" else "lo"
        timeout = datetime.timedelta(seconds=timeout_s)
        store = dist.TCPStore(_LOOPBACK, port, size, is_master=False, timeout=timeout)
        if self.device.type == "cuda":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
            if self.device.index is not None:
                torch.cuda.set_device(self.device)
            dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timeout)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)

    def averaged(
        self, networks: nn.Module, loss_fn: Callable[..., Any], partial_gradients: bool = False
    ) -> Callable[..., Any]:
        """`loss_fn(networks, batch, context)` whose backward pass averages gradients over the group.

        Buffers of the networks become rank 0's at each call. `partial_gradients` allows for a loss that
        leaves some parameters out at some steps, the same in all learners.
        """
        module = nn.parallel.DistributedDataParallel(
            _Loss(networks, loss_fn, self), find_unused_parameters=partial_gradients
        )
        self._modules.append(module)
        return lambda networks, batch, context: module(batch, context)

    def counts(self, *mine: int) -> list[list[int]]:
        """The numbers of all learners, rank by rank, which must be equally many."""
        table = torch.zeros((self.size, len(mine)), dtype=torch.int64, device=self.device)
        table[self.rank] = torch.tensor(mine)
        return self.total(table).tolist()

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all learners' tensors, which must be alike in shape and dtype; a new tensor."""
        summed = tensor.detach().clone()
        dist.all_reduce(summed)
        return summed

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of all learners' tensors, alike in shape and dtype; a new tensor."""
        maximum = tensor.detach().clone()
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        return maximum

    def close(self) -> None:
        """Leaves the group; a peer that still waits for this one gets an error. Its losses end here too."""
        # A reducer that were the last to know of the group would end it, and wait for its thread, with the
        # interpreter's lock in hand. The thread may need that lock for its last tensors: PyTorch issue 56297.
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
            # Gradients are averaged as if all learners had equally many elements; one with more weighs more.
            weight = output.weight.detach().float()
            share = weight * self._group.size / self._group.total(weight).clamp(min=1e-8)
            output = output._replace(loss=output.loss * share)
        # A parameter that only a metric depends on gets no gradient, so that no learner waits for one.
        return output._replace(metrics={name: value.detach() for name, value in output.metrics.items()})
