"""A plain copy in one process: the limit of the machine's memory for one thread."""

from __future__ import annotations

import ctypes

import torch

from benchmarks.frame.work import Work
from benchmarks.tensors.cargo import Cargo, fingerprint, new_tensors
from benchmarks.tensors.payloads import MEASURED, Payload


class Copies:
    """Copies the tensors of a payload into other tensors, which have been written before."""

    def __init__(self) -> None:
        self._cargo = Cargo()
        self._targets: list[list[torch.Tensor]] = []
        self._moves: list[tuple[int, int, int]] = []

    def work(self, payload: Payload) -> Work:
        return Work(self._run, payload.overlapping, lambda: self._load(payload))

    def _run(self) -> None:
        memmove = ctypes.memmove
        for target, source, size_bytes in self._moves:
            memmove(target, source, size_bytes)

    def _load(self, payload: Payload) -> None:
        if self._cargo.load(payload):
            self._targets = []
            self._targets = [_warm_tensors(payload) for _ in range(payload.overlapping)]
            self._moves = self._planned(payload)
            self._cargo.prove(self._transfer)

    def _planned(self, payload: Payload) -> list[tuple[int, int, int]]:
        """Returns the arguments of every ``memmove``, so that a run needs no look-ups."""
        there = [
            (target.data_ptr(), source.data_ptr(), payload.size_bytes)
            for targets in self._targets
            for target, source in zip(targets, self._cargo.tensors, strict=True)
        ]
        back = [(source, target, size) for target, source, size in there]
        return there + back if payload.way == "echo" else there

    def _transfer(self) -> int:
        self._run()
        return fingerprint(self._targets[-1])


def copy_works() -> dict[str, Work]:
    """Returns the works of a process that copies."""
    copies = Copies()
    return {payload.name: copies.work(payload) for payload in MEASURED}


def _warm_tensors(payload: Payload) -> list[torch.Tensor]:
    tensors = new_tensors(payload.tensors, payload.size_bytes)
    for tensor in tensors:
        tensor.zero_()
    return tensors
