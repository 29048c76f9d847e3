"""The measured programs: the same code for either RPC library, beside the copy and sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from benchmarks.frame.api import Api
from benchmarks.frame.work import Work
from benchmarks.tensors.cargo import Cargo, fingerprint
from benchmarks.tensors.copying import copy_works
from benchmarks.tensors.payloads import MEASURED, Payload
from benchmarks.tensors.streaming import (
    serve_tcp_socket,
    serve_tls_socket,
    serve_unix_socket,
    tcp_socket_works,
    tls_socket_works,
    unix_socket_works,
)

__all__ = [
    "copy_works",
    "namespaces_socket_works",
    "serve_namespaces_socket",
    "serve_tcp_socket",
    "serve_tls_socket",
    "serve_unix_socket",
    "tcp_socket_works",
    "tls_socket_works",
    "unix_socket_works",
    "works",
]

Answer = TypeVar("Answer")

# Between two namespaces, only the address differs.
namespaces_socket_works, serve_namespaces_socket = tcp_socket_works, serve_tcp_socket


def take(tensors: list[torch.Tensor]) -> None:
    """Takes tensors, which are dropped when it returns; called for one way."""


def echo(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors; called for an answer of the same size."""
    return tensors


class Sender:
    """Makes calls that carry a payload; torch's and Weft's RPC have the same interface."""

    def __init__(self, api: Api) -> None:
        self._rpc = api.rpc
        self._callee = api.peers[0]
        self._cargo = Cargo()

    def work(self, payload: Payload) -> Work:
        runs: dict[str, Callable[[], object]] = {
            "one way": lambda: self._call(take),
            "echo": lambda: self._call(echo),
            "in flight": lambda: self._call_overlapping(payload.overlapping),
        }
        return Work(runs[payload.way], payload.overlapping, lambda: self._load(payload))

    def _call(self, function: Callable[[list[torch.Tensor]], Answer]) -> Answer:
        answer: Answer = self._rpc.rpc_sync(self._callee, function, args=(self._cargo.tensors,))
        return answer

    def _call_overlapping(self, calls: int) -> object:
        arguments = (self._cargo.tensors,)
        return torch.futures.wait_all(
            [self._rpc.rpc_async(self._callee, take, args=arguments) for _ in range(calls)]
        )

    def _load(self, payload: Payload) -> None:
        if self._cargo.load(payload):
            self._cargo.prove(lambda: self._transfer(payload))

    def _transfer(self, payload: Payload) -> int:
        if payload.way == "echo":
            return fingerprint(self._call(echo))
        return self._call(fingerprint)


def works(api: Api) -> dict[str, Work]:
    """Returns the works of an RPC library."""
    sender = Sender(api)
    return {payload.name: sender.work(payload) for payload in MEASURED}
