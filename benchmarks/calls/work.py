"""The programs that are measured: the same lines for either RPC, and a raw socket's ping-pong."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

CALLEE = "callee"
IN_FLIGHT = (1, 100, 2000)

# What a call of a Python function with a two-element tensor takes on the wire, and its answer:
# the function's name, the tensor's description and 8 bytes of it, and a frame around them. Below a
# kilobyte, the exact number makes no difference that can be measured.
REQUEST_BYTES = 160
ANSWER_BYTES = 96


class Work(NamedTuple):
    """Something to run again and again, and the calls that one run of it makes."""

    run: Callable[[], None]
    calls: int = 1

    def measure(self, calls: int) -> list[float]:
        """Makes at least ``calls`` calls; returns for each run the seconds that a call took."""
        seconds = []
        for _ in range(max(1, calls // self.calls)):
            begin = time.perf_counter_ns()
            self.run()
            seconds.append((time.perf_counter_ns() - begin) / 1e9 / self.calls)
        return seconds


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Is the function that is called: it does nothing, so what is measured is the call."""
    return tensor


def rpc_works(rpc: Any) -> dict[str, Work]:
    """Returns the works of an RPC, torch's or Weft's: both have the same interface."""
    tensor = torch.ones(2)

    def function() -> None:
        rpc.rpc_sync(CALLEE, echo, args=(tensor,))

    def operator() -> None:
        rpc.rpc_sync(CALLEE, torch.add, args=(tensor, 1))

    def reference() -> None:
        rpc.remote(CALLEE, echo, args=(tensor,)).to_here()

    def overlapping(in_flight: int) -> Work:
        def batch() -> None:
            calls = [rpc.rpc_async(CALLEE, echo, args=(tensor,)) for _ in range(in_flight)]
            torch.futures.wait_all(calls)

        return Work(batch, in_flight)

    works = {"function": Work(function), "operator": Work(operator), "reference": Work(reference)}
    works.update({f"in flight {count}": overlapping(count) for count in IN_FLIGHT})
    return works


def raw_works(connection: socket.socket) -> dict[str, Work]:
    """Returns the one work of a socket: a request of the same size, and an answer."""
    request = bytes(REQUEST_BYTES)

    def function() -> None:
        connection.sendall(request)
        receive(connection, ANSWER_BYTES)

    return {"function": Work(function)}


def answer_raw(connection: socket.socket) -> None:
    """Answers requests on ``connection`` until it is closed."""
    answer = bytes(ANSWER_BYTES)
    while receive(connection, REQUEST_BYTES):
        connection.sendall(answer)


def receive(connection: socket.socket, size_bytes: int) -> bool:
    """Reads ``size_bytes``; returns False where the other side has closed instead."""
    while size_bytes:
        received = len(connection.recv(size_bytes))
        if not received:
            return False
        size_bytes -= received
    return True
