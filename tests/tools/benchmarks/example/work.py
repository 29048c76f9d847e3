from __future__ import annotations

import os
import socket

from benchmarks.frame.work import Numbers, Work


def echo_works(connections: list[socket.socket]) -> dict[str, Work | Numbers]:
    """Returns the works of a side that has an answering process for each connection."""

    def ask_all() -> None:
        for connection in connections:
            connection.sendall(b"?")
            assert connection.recv(1) == b"!"

    return {
        "ask": Work(ask_all, len(connections)),
        "end": Work(lambda: os._exit(3)),
        "close": Numbers(lambda: [1.0, 2.0]),
        "far": Numbers(lambda: [1.0, 2.0]),
    }


def serve_echo(connection: socket.socket) -> None:
    while connection.recv(1):
        connection.sendall(b"!")


def alone_works() -> dict[str, Work | Numbers]:
    """Returns the works of a one-process side; one work checks how the process was started."""
    return {
        "ask": Work(lambda: None),
        "environment": Work(_check_environment),
        "close": Numbers(lambda: [1.0, 2.0000001]),
        "far": Numbers(lambda: [1.0, 2.1]),
    }


def _check_environment() -> None:
    assert os.environ["EXAMPLE"] == "set"
    assert os.environ["OMP_NUM_THREADS"] == "1"


def broken_works() -> dict[str, Work | Numbers]:
    raise ValueError("this side cannot start")
