"""A faulty network: connections pass through a process that cuts them at random bytes.

Run as a program, this module is that process. It prints its port. A connection to it begins with
the destination address, as a line. When its standard input ends, it prints how many connections
there were, and how many it has cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from torchweft.engine.io import addresses
from torchweft.engine.io.addresses import Address, TcpAddress

_PIECE_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)
LIMIT_S = 20.0


class CuttingNetwork:
    """A process that relays TCP connections and cuts them.

    Args:
        seed: Seeds the cuts.
        mean_bytes: Mean number of bytes that a connection carries before it is cut.
        most_cuts: Number of cuts after which the network is perfect.
    """

    def __init__(self, seed: int, mean_bytes: int, most_cuts: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(seed), str(mean_bytes), str(most_cuts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def close(self) -> dict[str, int]:
        """Ends the network; returns how many connections there were, and how many it cut."""
        found, _ = self._process.communicate(timeout=LIMIT_S)
        counts: dict[str, int] = json.loads(found)
        return counts


def dial_through(port: int | None) -> None:
    """Makes this process dial through the network that listens on ``port``; directly if None."""
    addresses.dial = _dial if port is None else _dialler_through(port)


_dial = addresses.dial


def _dialler_through(port: int) -> Callable[..., socket.socket]:
    def dial(address: Address, timeout_s: float) -> socket.socket:
        if not isinstance(address, TcpAddress):
            return _dial(address, timeout_s)
        connection = _dial(TcpAddress("127.0.0.1", port), timeout_s)
        connection.sendall(f"{address.host} {address.port}\n".encode())
        return connection

    return dial


class _Cutter:
    def __init__(self, seed: int, mean_bytes: int, most_cuts: int) -> None:
        self._chance = random.Random(seed)
        self._mean_bytes = mean_bytes
        self._most_cuts = most_cuts
        self.cuts = 0
        self.connections = 0

    async def carry(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            host, port = (await near.readline()).decode().split()
            far, to_far = await asyncio.open_connection(host, int(port))
        except (OSError, ValueError):
            to_near.close()
            return
        left = [int(self._chance.expovariate(1 / self._mean_bytes))]
        ways = [self._pump(near, to_far, left), self._pump(far, to_near, left)]
        tasks = [asyncio.ensure_future(way) for way in ways]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in (to_near, to_far):
            self._end(writer)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[int]
    ) -> None:
        while True:
            data = await reader.read(_PIECE_BYTES)
            if not data:
                return
            if left[0] <= len(data) and self.cuts < self._most_cuts:
                self.cuts += 1
                writer.write(data[: left[0]])
                return
            left[0] -= len(data)
            writer.write(data)
            await writer.drain()

    def _end(self, writer: asyncio.StreamWriter) -> None:
        """Closes one side: in order, or with a reset that loses the data in flight."""
        if self._chance.random() < 0.5:
            end: Any = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):  # It may have ended by itself.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.close()


async def _serve(cutter: _Cutter) -> None:
    server = await asyncio.start_server(cutter.carry, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(json.dumps({"connections": cutter.connections, "cuts": cutter.cuts}))


if __name__ == "__main__":
    cutting = _Cutter(*map(int, sys.argv[1:]))
    asyncio.run(_serve(cutting))
