"""A line between two bridges that delays packets and loses some: `slow_line.py DELAY LOSS`.

The kernel's own `tc netem` does this too, where it is compiled in. This works wherever TAP devices do: it
forwards between `to_near` and `to_bridge`, in the order in which the packets came.
"""

from __future__ import annotations

import collections
import fcntl
import os
import random
import select
import struct
import sys
import time

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_LONGEST = 1 << 16
_QUEUE = 10_000  # Packets under way in each direction; more are lost, as in a router.


def tap(name: str) -> int:
    """Makes a TAP device, which lives as long as its descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


def main(delay: float, loss: float) -> None:
    ends = [tap("to_near"), tap("to_bridge")]
    print("ready", flush=True)
    others = {ends[0]: ends[1], ends[1]: ends[0]}
    under_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        wait = None if not under_way else max(0.0, under_way[0][0] - time.monotonic())
        for end in select.select(ends, [], [], wait)[0]:
            packet = os.read(end, _LONGEST)
            if random.random() >= loss and len(under_way) < _QUEUE:
                under_way.append((time.monotonic() + delay, others[end], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            try:
                os.write(end, packet)
            except OSError:  # A full device, or one that is not up yet, loses the packet.
                continue


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
