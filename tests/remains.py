"""Tells what a worker still keeps: references, contexts, passes, gatherings, streams and calls.

Tests ask each worker for it, to check that nothing is left behind. This module belongs to the
harness: it reads the internals of Weft, so that the tests in ``tests/contract`` need not.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

from torchweft import rpc
from torchweft.autograd.engine import current_engine
from torchweft.engine.worker.current import current
from torchweft.rpc.collective import current_gatherings
from torchweft.rpc.sources import SOURCES
from torchweft.rpc.worker import current_worker

LIMIT_S = 20.0


def count_references() -> dict[str, int]:
    gc.collect()
    return current_worker().references.counts()


def bookkeeping_sizes() -> dict[str, int]:
    """Returns how many entries each table of the reference keeper has."""
    gc.collect()
    keeper = vars(current_worker().references)
    tables = ("_values", "_handles", "_confirmed", "_dead", "_sites", "_ended")
    return {name: len(keeper[name]) for name in tables if keeper[name]}


def count_gatherings() -> int:
    """Returns how many barriers and other gatherings this worker knows at present."""
    return len(current_gatherings())


def open_streams() -> int:
    return len(current().slots[SOURCES].open())


def open_calls() -> int:
    """Returns how many other calls from other workers are open here."""
    return sum(len(peer.served) for peer in current().peers.values()) - 1


def of_autograd() -> dict[str, list[Any]]:
    """Returns the contexts and passes that this worker still keeps."""
    engine = current_engine()
    return {
        "contexts": engine.contexts.ids(),
        "parts": list(engine.passes.parts),
        "led": list(engine.passes.led),
    }


def messages_recorded() -> tuple[int, int]:
    """Returns how many messages outside of contexts are recorded, as sent and as received."""
    gc.collect()
    return current_engine().outside.count()


def of_autograd_outside() -> dict[str, list[int]]:
    """Returns the contexts, passes and messages outside of contexts that this worker keeps."""
    engine = current_engine()
    return {
        "contexts": engine.contexts.ids(),
        "parts": list(engine.passes.parts),
        "recorded": [count for count in messages_recorded() if count],
    }


def await_no_autograd(query: Callable[[], Mapping[str, list[Any]]] = of_autograd) -> None:
    """Waits until the driver and its two workers keep nothing of what ``query`` returns."""
    deadline_s = time.monotonic() + LIMIT_S
    for worker in ("driver", "worker0", "worker1"):
        while any((left := rpc.rpc_sync(worker, query)).values()):
            assert time.monotonic() < deadline_s, f"{worker} still has {left}"
            time.sleep(0.01)
