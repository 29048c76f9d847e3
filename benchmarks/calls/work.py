"""The measured programs: the same code for either RPC library, and a raw socket's ping-pong."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.calls.actors import monarch_works, ray_works
from benchmarks.frame.api import Api
from benchmarks.frame.work import Work

__all__ = [
    "monarch_works",
    "raw_spinning_works",
    "raw_works",
    "ray_works",
    "serve_raw",
    "serve_raw_spinning",
    "works",
]

THREADS = 8

# Sizes on the wire of a call of a Python function with a two-element tensor, and of its answer:
# the function's name, the tensor's description, its 8 bytes of data, and a frame around them. Below
# a kilobyte, the exact number makes no measurable difference.
REQUEST_BYTES = 160
ANSWER_BYTES = 96


def echo(value: object) -> object:
    """Returns its argument; it does no work, so only the call is measured."""
    return value


class Echo:
    """The object that remote references refer to."""

    def echo(self, value: object) -> object:
        return value


def works(api: Api) -> dict[str, Work]:
    """Returns the works of an RPC library, torch's or Weft's: both have the same interface."""
    tensor = torch.ones(2)
    values = {"0": None, "1": tensor, "16": [torch.ones(2) for _ in range(16)]}
    found = {}
    for count, value in values.items():
        for form, run in _forms(api, value).items():
            found[f"{form} {count}"] = Work(run)
    rpc, callee = api.rpc, api.peers[0]
    found["paced"] = Work(found["sync 1"].run, prepare=_pause)
    found["operator"] = Work(lambda: rpc.rpc_sync(callee, torch.add, args=(tensor, 1)))
    for in_flight in (100, 2000):
        found[f"flight {in_flight}"] = Work(_overlapping(api, tensor, in_flight), in_flight)
        found[f"threads {in_flight}"] = _from_threads(
            _overlapping(api, tensor, in_flight // THREADS), in_flight // THREADS
        )
    found["threads 8"] = _from_threads(_one_by_one(api, tensor, 50), 50)
    return found


def _pause() -> None:
    """Waits for a random time, so that a call arrives at any moment of the callee's activity.

    Calls without a pause would all be made in the few milliseconds that the callee's interpreter
    gives to the answering thread, and would hardly show the wait for that thread's next turn.
    """
    time.sleep(random.uniform(0.0005, 0.0015))


def _forms(api: Api, value: object) -> dict[str, Callable[[], object]]:
    """Returns a call of each form, carrying ``value`` there and back."""
    rpc, callee = api.rpc, api.peers[0]
    reference = rpc.remote(callee, Echo)
    return {
        "sync": lambda: rpc.rpc_sync(callee, echo, args=(value,)),
        "async": lambda: rpc.rpc_async(callee, echo, args=(value,)).wait(),
        "remote": lambda: rpc.remote(callee, echo, args=(value,)).to_here(),
        "proxy": lambda: reference.rpc_sync().echo(value),
    }


def _overlapping(api: Api, tensor: torch.Tensor, in_flight: int) -> Callable[[], object]:
    rpc, callee = api.rpc, api.peers[0]

    def batch() -> object:
        calls = [rpc.rpc_async(callee, echo, args=(tensor,)) for _ in range(in_flight)]
        return torch.futures.wait_all(calls)

    return batch


def _one_by_one(api: Api, tensor: torch.Tensor, calls: int) -> Callable[[], object]:
    rpc, callee = api.rpc, api.peers[0]

    def batch() -> None:
        for _ in range(calls):
            rpc.rpc_sync(callee, echo, args=(tensor,))

    return batch


def _from_threads(batch: Callable[[], object], calls: int) -> Work:
    """Returns a work that makes the same batch in each of several threads at once."""
    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="caller")

    def run() -> None:
        for done in [threads.submit(batch) for _ in range(THREADS)]:
            done.result()

    return Work(run, calls * THREADS)


def raw_works(connections: list[socket.socket]) -> dict[str, Work]:
    """Returns the only work of a raw socket: a request of the same size, and an answer."""
    connection = connections[0]
    request = bytes(REQUEST_BYTES)

    def call() -> None:
        connection.sendall(request)
        receive(connection, ANSWER_BYTES)

    return {"sync 1": Work(call)}


def serve_raw(connection: socket.socket) -> None:
    """Answers requests on ``connection`` until it is closed."""
    answer = bytes(ANSWER_BYTES)
    while receive(connection, REQUEST_BYTES):
        connection.sendall(answer)


def raw_spinning_works(connections: list[socket.socket]) -> dict[str, Work]:
    """Returns the same work for two processes that never sleep: one core each, all the time.

    If the processes share a core, each waits for the other's time slice to end.
    """
    connections[0].setblocking(False)
    return raw_works(connections)


def serve_raw_spinning(connection: socket.socket) -> None:
    connection.setblocking(False)
    serve_raw(connection)


def receive(connection: socket.socket, size_bytes: int) -> bool:
    """Reads ``size_bytes``; returns False if the other side has closed instead."""
    while size_bytes:
        try:
            received = len(connection.recv(size_bytes))
        except BlockingIOError:  # a spinning side
            continue
        if not received:
            return False
        size_bytes -= received
    return True
