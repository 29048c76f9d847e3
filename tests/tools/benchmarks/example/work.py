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
    }


def serve_echo(connection: socket.socket) -> None:
    while connection.recv(1):
        connection.sendall(b"!")


def alone_works() -> dict[str, Work | Numbers]:
    return {"ask": Work(lambda: None)}


def broken_works() -> dict[str, Work | Numbers]:
    raise ValueError("this side cannot start")
