"""A gate for the steps of many trainers, so that a snapshot can wait until no step is under way.

Trainers that share parameters step independently. A snapshot taken meanwhile would contain the
effects of a step on some workers, but not on others. So each step goes through the gate, and a
snapshot closes it: then no step begins, and the gate is closed once the steps under way have ended.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchweft.checkpoint.parts import owner_of
from torchweft.errors import CallTimeout, WeftError
from torchweft.extending import caller, check_types, ignore_errors, tell_losses, worker_of
from torchweft.rpc import (
    UNSET_RPC_TIMEOUT,
    RRef,
    functions,
    rpc_async,
    rpc_sync,
)

_Key = tuple[int, str]
"""Names a step or a close: the id of its worker, and a token that this worker has chosen."""


class StepGate:
    """Lets steps through, except while it is closed.

    Make a gate on the worker that saves, and send it to the workers that train::

        gate = torchweft.checkpoint.StepGate()          # the driver; it passes it on in a call

        with gate.step(), torchweft.autograd.context() as context_id:      # a trainer, each step
            torchweft.autograd.backward(context_id, [loss_of(batch)])
            optimizer.step(context_id)

        torchweft.checkpoint.save(directory, state, step=step, gate=gate)  # the driver

    A step must not begin another step within it. The steps of a lost worker count as ended, and a
    gate that it had closed is opened. Thread-safe.

    Attributes:
        reference: A reference to the gate, to be sent in its place to workers that unpickle
            nothing; see ``from_reference``.
    """

    reference: RRef[Any]

    def __init__(self) -> None:
        gate = _Gate()
        # By id: another life may have the name of the lost one by now.
        tell_losses(
            gate, lambda found, _: found.end_lost(lambda worker: worker_of(worker).lost is not None)
        )
        self.reference = RRef(gate)

    @classmethod
    def from_reference(cls, reference: RRef[Any]) -> StepGate:
        """Returns a gate that another worker has made."""
        made = cls.__new__(cls)
        made.reference = reference
        return made

    @contextlib.contextmanager
    def step(self, timeout: float = UNSET_RPC_TIMEOUT) -> Iterator[None]:
        """Begins a step, and ends it with the ``with`` block. Blocks while the gate is closed.

        Args:
            timeout: Seconds to wait for it to open; 0 for no limit, and by default the timeout of
                calls.

        Raises:
            CallTimeout: The gate stayed closed.
            WorkerLost: The worker that made the gate is lost.
        """
        with self._held(False, timeout):
            yield

    @contextlib.contextmanager
    def closed(self, timeout: float = UNSET_RPC_TIMEOUT) -> Iterator[None]:
        """Closes the gate for a ``with`` block. Blocks until no step is under way.

        Args:
            timeout: Seconds to wait for that; 0 for no limit, and by default the timeout of calls.

        Raises:
            CallTimeout: A step did not end; names the workers whose steps are under way.
            WorkerLost: The worker that made the gate is lost.
        """
        with self._held(True, timeout):
            yield

    @contextlib.contextmanager
    def _held(self, is_closing: bool, timeout: float) -> Iterator[None]:
        owner = owner_of(self.reference)
        token = secrets.token_hex(8)
        try:
            try:
                rpc_sync(owner, _begin, (self.reference, token, is_closing), timeout=timeout)
            except CallTimeout as error:
                if is_closing:
                    who = rpc_sync(owner, _inside, (self.reference,))
                    names = ", ".join(map(repr, who)) or "no worker any more"
                    what = f"steps are under way on {names}"
                else:
                    what = "the gate is closed: a snapshot is taken, or waits for a step to end"
                raise CallTimeout(
                    f"timed out after {error.elapsed_s:.1f} s: {what}",
                    worker=error.worker,
                    call=error.call,
                    elapsed_s=error.elapsed_s,
                ) from error
            yield
        finally:
            # Not awaited: the next step or snapshot waits for it if necessary.
            with contextlib.suppress(WeftError):
                ignore_errors(rpc_async(owner, _end, (self.reference, token)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.reference,)


def _received(reference: RRef[Any]) -> StepGate:
    return StepGate.from_reference(reference)


class _Gate:
    """The gate itself, on the worker that made it. Thread-safe.

    A request to close goes before requests to begin a step: otherwise steps in close succession
    would keep the gate from ever closing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: set[_Key] = set()
        self._closers: set[_Key] = set()
        self._waiting: dict[_Key, torch.futures.Future[None]] = {}

    def begin(self, key: _Key, is_closing: bool) -> torch.futures.Future[None]:
        """Begins a step once no closer holds or awaits the gate, or a close once no step does.

        Returns:
            A future that is done when it has begun.
        """
        waiting: torch.futures.Future[None] = torch.futures.Future()
        with self._lock:
            self._waiting[key] = waiting
            if is_closing:
                self._closers.add(key)
        self._go_on()
        return waiting

    def end(self, key: _Key) -> None:
        """Ends a step or a close, also one that still waits."""
        with self._lock:
            self._steps.discard(key)
            self._closers.discard(key)
            self._waiting.pop(key, None)
        self._go_on()

    def inside(self) -> set[int]:
        """Returns the ids of the workers whose steps are under way."""
        with self._lock:
            return {who for who, _ in self._steps}

    def end_lost(self, is_lost: Callable[[int], bool]) -> None:
        """Ends all steps and closes of lost workers, of which ``is_lost`` tells by their ids."""
        with self._lock:
            begun = {*self._steps, *self._closers, *self._waiting}
        for key in begun:
            if is_lost(key[0]):
                self.end(key)

    def _go_on(self) -> None:
        """Completes all waiting steps and closes that may proceed."""
        with self._lock:
            if not self._closers:
                self._steps.update(self._waiting)
                free = list(self._waiting)
            else:
                free = [] if self._steps else [key for key in self._waiting if key in self._closers]
            done = [self._waiting.pop(key) for key in free]
        # Outside the lock: a callback of a future may call the gate again.
        for waiting in done:
            waiting.set_result(None)


# Called by trainers and the driver on the worker that made the gate.


@functions.async_execution
def _begin(gate: RRef[_Gate], token: str, is_closing: bool) -> torch.futures.Future[None]:
    return _held(gate).begin((caller().id, token), is_closing)


def _end(gate: RRef[_Gate], token: str) -> None:
    _held(gate).end((caller().id, token))


def _inside(gate: RRef[_Gate]) -> list[str]:
    return sorted(worker_of(worker).name for worker in _held(gate).inside())


def _held(reference: RRef[_Gate]) -> _Gate:
    gate = reference.local_value()
    check_types(gate=(gate, _Gate))
    return gate


CALLABLES = (_begin, _end, _inside)
"""The functions that trainers call on the worker that made a gate."""
