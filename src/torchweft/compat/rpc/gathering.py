"""Exchanging a value with all others, under the private names that programs use for it.

What is called on other workers lives in ``torchweft.compat.rpc.api`` and is looked up there each
time: programs and tests replace it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torchweft.agent.current import current
from torchweft.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from torchweft.errors import CallError
from torchweft.rpc.collective import members
from torchweft.rpc.futures import Future
from torchweft.rpc.gathering import Gathering, Gatherings, Limits, Ways

AllGatherStates = Gathering


def all_gather(
    value: Any, worker_names: Iterable[str] | None, timeout: float, ways: Ways
) -> dict[str, Any]:
    """Exchanges a value with other workers; see ``torchweft.rpc.all_gather``.

    Args:
        value: What this worker brings.
        worker_names: Who takes part; None, or nobody, for all.
        timeout: Seconds for each call and for waiting for the others; 0 for no limit. By default
            the worker's limit for each call, and none for waiting.
        ways: What the workers call on one another.

    Raises:
        CallError: Some workers could not be told; says which.
    """
    agent = current()
    limits = _limits(timeout, agent.default_timeout_s)
    peers = members(agent, worker_names or None)
    outcome = agent.part(Gatherings).gather(value, peers, ways, limits)
    failed = {
        name: error
        for name, call in outcome.calls.items()
        if (error := _error_of(call)) is not None
    }
    if failed:
        first = next(iter(failed.values()))
        raise CallError(
            f"Followers {list(failed)} failed or timed out in {ways.name} after "
            f"{limits.call_s:.2f} seconds; the first error is {type(first).__name__}: {first}",
            worker=next(iter(failed)),
            call=ways.name,
        ) from first
    return outcome.values


def _limits(timeout: float, default_s: float) -> Limits:
    if timeout == UNSET_RPC_TIMEOUT:
        return Limits(0.0 if math.isinf(default_s) else default_s, math.inf)
    if timeout == DEFAULT_SHUTDOWN_TIMEOUT:
        return Limits(0.0, math.inf)
    return Limits(timeout, timeout)


def _error_of(call: Future[None]) -> Exception | None:
    """Waits for a call; returns its error."""
    try:
        call.wait()
    except Exception as error:
        return error
    return None


def brought(key: Any, worker_name: str, value: Any) -> None:
    """Notes on the leader that a worker has come, and what it brings."""
    current().part(Gatherings).led.brought(key, worker_name, value)


def told(key: Any, values: dict[str, Any]) -> None:
    """Notes on the others that all have come, and what they brought."""
    current().part(Gatherings).told(key, values)
