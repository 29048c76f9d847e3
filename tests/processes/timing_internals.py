"""Functions that read internals; ``timing.py`` in the contract has the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from tests.contract.processes.functions import wait_until
from tests.contract.processes.timing import LIMIT_S, note, noted
from torchweft import rpc
from torchweft.engine.protocol.calls import ServedCall
from torchweft.engine.worker.current import current
from torchweft.rpc.worker import current_worker


def parked(reference: rpc.RRef[Any]) -> int:
    """Returns how many calls wait here for a value to be computed."""
    owned = current_worker().references.value_of(reference.id)
    return len(owned._callbacks or ())


def hold_until_cancelled(name: str, count: int) -> None:
    """Keeps its thread until ``count`` calls that wait behind it are cancelled."""
    _hold(name, count, lambda call: call.was_cancelled)


def hold_until_one_waits(name: str, seconds: float) -> None:
    """Keeps its thread until a call has waited behind it for ``seconds``."""
    _hold(name, 1, lambda call: time.monotonic() - call.arrived_s > seconds)


def _hold(name: str, count: int, is_meant: Callable[[ServedCall], bool]) -> None:
    def is_there() -> bool:
        if not noted(name) and sum(is_meant(call) for call in _waiting_here()) >= count:
            note(name)  # For the other holders: the waiting call is soon gone.
        return bool(noted(name))

    wait_until(is_there, lambda: "none waits that is meant", LIMIT_S)


def _waiting_here() -> list[ServedCall]:
    """Returns the calls from other workers that have not begun, except the holders."""
    calls = [call for peer in current().peers.values() for call in peer.served.copy().values()]
    frames = [(call, call.frame) for call in calls]
    return [call for call, frame in frames if frame and b"hold_until" not in bytes(frame.control)]


def note_and_return(name: str, *_: Any) -> torch.Tensor:
    note(name)
    return torch.ones(3)
