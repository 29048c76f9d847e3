"""The tensors that are sent, and the check that they arrive unchanged."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.tensors.payloads import Payload

INTERFACE_VARIABLE = "BENCHMARK_INTERFACE"


class Cargo:
    """The tensors of one payload: kept from call to call, released when another is loaded.

    So a process never holds more than one payload, and the sender's memory is ordinary torch
    memory that has been written before, as activations are.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._loaded: Payload | None = None
        self._proven: set[Payload] = set()

    def load(self, payload: Payload) -> bool:
        """Makes the tensors; returns False if they exist already."""
        if payload == self._loaded:
            return False
        self.tensors = []  # release first: two payloads of 1 GiB may not fit
        self.tensors = new_tensors(payload.tensors, payload.size_bytes)
        self._loaded = payload
        return True

    def prove(self, transfer: Callable[[], int]) -> None:
        """Transfers the tensors, once for each payload, and checks the received data.

        Args:
            transfer: Sends the tensors and returns the ``fingerprint`` of the received data.

        Raises:
            RuntimeError: The received data differs, or bypassed the expected interface.
        """
        payload = self._loaded
        if payload is None or payload in self._proven:
            return
        interface = os.environ.get(INTERFACE_VARIABLE)
        before = _sent_bytes(interface) if interface else 0
        if transfer() != fingerprint(self.tensors):
            raise RuntimeError(f"{payload.name}: what arrived is not what was sent")
        if interface and _sent_bytes(interface) - before < payload.call_bytes:
            raise RuntimeError(f"{payload.name}: the tensors did not travel over {interface}")
        self._proven.add(payload)


def new_tensors(count: int, size_bytes: int) -> list[torch.Tensor]:
    """Returns tensors whose numbers all differ; writing them also warms their memory."""
    length = size_bytes // 4
    return [
        torch.arange(first, first + length, dtype=torch.int32)
        for first in range(0, count * length, length)
    ]


def fingerprint(tensors: Sequence[torch.Tensor]) -> int:
    """Returns a checksum of all bytes of tensors in their order."""
    return checksum_of([view(tensor) for tensor in tensors])


def checksum_of(views: Sequence[memoryview]) -> int:
    """Returns a checksum of all bytes in their order."""
    checksum = 0
    for one in views:
        checksum = zlib.crc32(one, checksum)
    return checksum


def view(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor, without a copy."""
    return tensor.numpy().data.cast("B")


def _sent_bytes(interface: str) -> int:
    """Returns the number of bytes that a network interface of this process's namespace has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise RuntimeError(f"there is no network interface {interface!r} here")
