"""The repeated operations: a mix of all calls that users make, and autograd contexts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchweft import autograd, rpc

CALLEE = "worker0"
CALLS_A_TURN = 100


class Refused(ValueError):
    """The error that a failing call raises."""


class Counter:
    """An object that lives at the callee."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self, value: object) -> object:
        self.calls += 1
        return value


def echo(value: object) -> object:
    return value


def refuse(value: object) -> object:
    raise Refused(f"refused as asked: {value}")


def call_back(caller: str, value: object) -> object:
    return rpc.rpc_sync(caller, echo, args=(value,))


def use(reference: rpc.RRef[Counter]) -> int:
    """Uses an object of this worker through a reference that was passed to it."""
    reference.local_value().count(None)
    return reference.local_value().calls


class Mix:
    """Makes calls of every kind, repeating the same hundred.

    Args:
        caller: Name of the worker that this process is.
    """

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._small = torch.ones(2)
        self._medium = torch.ones(1 << 16)  # 256 KiB: streamed
        self._large = torch.ones(1 << 19)  # 2 MiB: pulled from the sender's memory
        self._counter = rpc.remote(CALLEE, Counter)

    def turn(self) -> None:
        """Makes about ``CALLS_A_TURN`` calls."""
        self._repeat(35, lambda: self._sync(self._small))
        self._repeat(5, lambda: self._sync({"step": 1, "loss": 0.5, "ids": [1, 2, 3]}))
        self._asynchronous(20)
        self._repeat(10, lambda: self._counter.rpc_sync().count(self._small))
        self._repeat(10, lambda: rpc.remote(CALLEE, echo, args=(self._small,)).to_here())
        self._repeat(2, self._handed_on)  # two calls each
        self._repeat(6, self._refused)
        self._repeat(2, self._called_back)  # two calls each
        self._repeat(4, lambda: self._sync(self._medium))
        self._repeat(2, lambda: self._sync(self._large))

    def _repeat(self, times: int, call: Callable[[], object]) -> None:
        for _ in range(times):
            call()

    def _sync(self, value: object) -> object:
        return rpc.rpc_sync(CALLEE, echo, args=(value,))

    def _asynchronous(self, calls: int) -> None:
        torch.futures.wait_all(
            [rpc.rpc_async(CALLEE, echo, args=(self._small,)) for _ in range(calls)]
        )

    def _handed_on(self) -> None:
        rpc.rpc_sync(CALLEE, use, args=(rpc.remote(CALLEE, Counter),))

    def _called_back(self) -> None:
        rpc.rpc_sync(CALLEE, call_back, args=(self._caller, self._small))

    def _refused(self) -> None:
        try:
            rpc.rpc_sync(CALLEE, refuse, args=(self._small,))
        except Refused:
            return
        raise AssertionError("a call that must fail has succeeded")


WEIGHT = torch.ones(16, requires_grad=True)


def forward(value: torch.Tensor) -> torch.Tensor:
    return value * WEIGHT


def run_context() -> None:
    """Runs forward through the callee and backward again, in its own context."""
    value = torch.ones(16, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync(CALLEE, forward, args=(value,)).sum()
        autograd.backward(context, [loss])
        gradients = autograd.get_gradients(context)
        if not torch.equal(gradients[value], torch.ones(16)):
            raise AssertionError(f"wrong gradient: {gradients}")
