"""Collective operations: workers wait for one another, and exchange one value each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

from torchweft.agent.agent import Agent
from torchweft.agent.current import current
from torchweft.agent.peers import Peer
from torchweft.arguments import limit_of
from torchweft.rpc.calls import Destination
from torchweft.rpc.constants import UNSET_RPC_TIMEOUT
from torchweft.rpc.current_call import remaining_time
from torchweft.rpc.gathering import Key, Limits, Outcome, Ways, check_key
from torchweft.rpc.gathering.following import current_gatherings
from torchweft.rpc.strictness import check_types, strict_caller
from torchweft.serialize.registry import remotely_callable
from torchweft.serialize.tracebacks import without_own_frames

T = TypeVar("T")


@without_own_frames
def barrier(
    workers: Iterable[Destination] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> None:
    """Blocks until all of ``workers`` have called ``barrier``.

    All name the same workers, in any order. The same workers may do so repeatedly, and other
    workers at the same time. Does not wait for calls that were started earlier.

    Args:
        workers: The participants, this worker included: names, ranks or ``WorkerInfo``; None for
            the whole group. If workers join and leave meanwhile, name the participants.
        timeout: Seconds to wait at most; 0 for no limit, by default the worker's ``rpc_timeout``.

    Raises:
        CallTimeout: Not all called in time. The error of the worker of the lowest id names the
            missing workers.
        WorkerLost: A worker was lost before it called.
        ConfigurationError: This worker is not among ``workers``.
    """
    _gather(None, workers, timeout, _BARRIER)


@without_own_frames
def all_gather(
    value: T,
    workers: Iterable[Destination] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> dict[str, T]:
    """Gathers a value of each worker on all of them. Blocks until all have called.

    The values pass through the leader, the worker of the lowest id. That suits small values:
    settings, counts, references; exchange larger tensors by ``torch.distributed``.

    Args:
        value: This worker's value. The others get copies; references are sent as references.
        workers: The participants, as for ``barrier``.
        timeout: Seconds for the wait for the others, and for each call; as for ``barrier``.

    Returns:
        The values by worker name; this worker's own is ``value``, or a copy of it.

    Raises:
        CallTimeout: Not all called in time. The error of the worker of the lowest id names the
            missing workers.
        WorkerLost: A worker was lost before it called, or before it got the values.
        SerializationError: ``value`` cannot be serialized.
        CallError: Another worker's value cannot be serialized; names that worker.
        ConfigurationError: This worker is not among ``workers``.
    """
    outcome = _gather(value, workers, timeout, _ALL_GATHER)
    for call in outcome.calls.values():
        call.wait()
    return outcome.values


def members(agent: Agent, workers: Iterable[Destination] | None) -> list[Peer]:
    """Returns the named workers, or all if ``workers`` is None.

    Raises:
        UnknownWorker: No worker has a given name or rank.
    """
    return agent.members.present() if workers is None else [agent.find(each) for each in workers]


def _gather(
    value: Any, workers: Iterable[Destination] | None, timeout: float, ways: Ways
) -> Outcome:
    agent = current()
    limit_s = limit_of(timeout, agent.default_timeout_s)
    limit_s = min(limit_s, remaining_time())  # No longer than the served call.
    limits = Limits(0.0 if math.isinf(limit_s) else limit_s, limit_s)
    return current_gatherings().gather(value, members(agent, workers), ways, limits)


# Functions that the workers call on one another.


@remotely_callable
def bring(key: Key, name: str, value: Any) -> None:
    """Records, on the leader, that another worker has arrived, and its value."""
    caller = strict_caller()
    if caller is not None:
        check_key(key, current(), caller, name)
    current_gatherings().led.brought(key, name, value)


@remotely_callable
def tell(key: Key, values: dict[str, Any]) -> None:
    """Records that all workers have arrived, and their values."""
    caller = strict_caller()
    if caller is not None:
        check_key(key, current(), caller)
        check_types(values=(values, dict))
    current_gatherings().told(key, values)


_BARRIER = Ways("barrier", bring, tell)
_ALL_GATHER = Ways("all_gather", bring, tell)
