"""A cable between two hosts, in user space, that loses frames, and reorders them by delays.

For kernels without netem; its randomness has a seed. Run as a program, this module is the cable:
it reads a line for each host to connect, and carries frames until its standard input ends.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import time
from typing import NamedTuple

_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_LONGEST_FRAME = 1 << 16
LIMIT_S = 20.0


class Impairment(NamedTuple):
    """The treatment of the frames of each direction.

    Attributes:
        loss: Fraction of the frames that is lost.
        delay_s: Mean delay of a frame.
        jitter_s: Largest deviation from the mean delay, either way.
    """

    loss: float
    delay_s: float
    jitter_s: float


class Cable:
    """A cable between two hosts, in a process of its own.

    Args:
        impairment: How it treats frames.
        seed: Seeds its randomness.
    """

    def __init__(self, impairment: Impairment, seed: int = 1) -> None:
        arguments = [str(value) for value in (seed, *impairment)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def connect(self, namespace: str, interface: str) -> None:
        """Makes a network interface at one end; raises OSError if that is impossible."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{namespace} {interface}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if answer != "connected":
            raise OSError(answer or "the cable has broken down")

    def close(self) -> str:
        """Ends the process; returns its report of frames carried and lost."""
        told, _ = self._process.communicate(timeout=LIMIT_S)
        return told


def _connect(line: str) -> int:
    from tests.contract.processes.hosts import enter

    namespace, interface = line.split()
    enter(namespace)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", interface.encode(), _IFF_TAP | _IFF_NO_PI)
    fcntl.ioctl(end, _TUNSETIFF, request)
    return end


def _carry(ends: list[int], chance: random.Random, how: Impairment) -> None:
    """Carries frames until the input ends."""
    poll = select.poll()
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    for fd in (0, *ends):
        poll.register(fd, select.POLLIN)
    waiting: list[tuple[float, int, int, bytes]] = []
    numbers = itertools.count()
    carried = lost = 0
    while True:
        pause_ms = max(0.0, waiting[0][0] - time.monotonic()) * 1e3 if waiting else None
        ready = [fd for fd, _ in poll.poll(pause_ms)]
        now_s = time.monotonic()
        for fd in ready:
            if not fd:
                print(f"{carried} frames carried, {lost} lost")
                return
            frame = os.read(fd, _LONGEST_FRAME)
            if chance.random() < how.loss:
                lost += 1
                continue
            due_s = now_s + how.delay_s + chance.uniform(-how.jitter_s, how.jitter_s)
            heapq.heappush(waiting, (due_s, next(numbers), other[fd], frame))
        while waiting and waiting[0][0] <= now_s:
            _, _, end, frame = heapq.heappop(waiting)
            _write(end, frame)
            carried += 1


def _write(end: int, frame: bytes) -> None:
    try:
        os.write(end, frame)
    except OSError:
        pass  # The interface is down or its queue is full: the frame is lost too.


def _main(seed: str, *impairment: str) -> None:
    ends: list[int] = []
    while len(ends) < 2:
        line = sys.stdin.readline()
        if not line:
            return
        try:
            ends.append(_connect(line))
        except OSError as error:
            print(error, flush=True)
            return
        print("connected", flush=True)
    _carry(ends, random.Random(int(seed)), Impairment(*map(float, impairment)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
