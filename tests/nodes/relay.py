"""A bad cable: two network devices, and a process that carries frames between them, but for some, and late.

`python relay.py NEAR FAR` makes the devices and says `held`; each line `LOSS DELAY_S` on its standard input is how the cable is
from then on. (Linux has `tc ... netem` for this, but not every kernel that tests run on.)
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from itertools import count

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x1002
_LONGEST = 65536


def device(name: str) -> int:
    """Make a device; its file descriptor. Frames are whole, with their check sums: it promises the kernel no offloads."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP_WITHOUT_HEADER))
    return descriptor


def carry(near: int, far: int) -> None:
    """Until standard input is closed."""
    loss, delay_s, said = 0.0, 0.0, b""
    other = {near: far, far: near}
    late: list[tuple[float, int, int, bytes]] = []
    serial, generator = count(), random.Random(1)
    poll = select.poll()
    for descriptor in (near, far, 0):
        poll.register(descriptor, select.POLLIN)
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        for descriptor, _ in poll.poll(None if wait_s is None else 1000 * wait_s):
            if descriptor == 0:
                more = os.read(0, 1024)
                if not more:
                    return
                *lines, said = (said + more).split(b"\n")
                for line in lines:
                    loss, delay_s = map(float, line.split())
                continue
            with contextlib.suppress(OSError):  # nothing is there any more, or the device is down
                while frame := os.read(descriptor, _LONGEST):
                    if generator.random() >= loss:
                        heapq.heappush(late, (time.monotonic() + delay_s, next(serial), other[descriptor], frame))
        while late and late[0][0] <= time.monotonic():
            _, _, descriptor, frame = heapq.heappop(late)
            with contextlib.suppress(OSError):  # its queue is full, or the device is down: one more that is lost
                os.write(descriptor, frame)


if __name__ == "__main__":
    ends = device(sys.argv[1]), device(sys.argv[2])
    print("held", flush=True)
    carry(*ends)
