"""What several workers do together: wait for one another, exchange a value each."""

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
    """Blocks until all of some workers have called this.

    Each of them names the same workers; the order does not matter. They may do so again and again,
    and other workers at the same time. Calls that were started before are not waited for.

    Args:
        workers: Those who take part: names, ranks or ``WorkerInfo``, this worker among them; None
            for the whole group. Where workers join and leave meanwhile, name them.
        timeout: Seconds to wait at most; 0 for no limit, and by default that of the worker.

    Raises:
        CallTimeout: Not all came in time; on the worker of the lowest rank it says who is missing.
        WorkerLost: A worker was lost before it came.
        ConfigurationError: This worker is not among ``workers``.
    """
    _gather(None, workers, timeout, _BARRIER)


@without_own_frames
def all_gather(
    value: T,
    workers: Iterable[Destination] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> dict[str, T]:
    """Exchanges a value with other workers: each gets those of all. Blocks until all have called.

    The values go through the worker of the lowest rank. That suits what is small: settings,
    counts, references; tensors of some size are better exchanged by ``torch.distributed``.

    Args:
        value: What this worker brings. The others get copies; references travel as such.
        workers: Those who take part, as for ``barrier``.
        timeout: Seconds that waiting for the others, and each call, may take; as for ``barrier``.

    Returns:
        The values by name of worker; that of this worker itself is ``value``, or a copy of it.

    Raises:
        CallTimeout: Not all came in time; on the worker of the lowest rank it says who is missing.
        WorkerLost: A worker was lost before it came, or before it was told.
        SerializationError: ``value`` cannot travel.
        CallError: The value of another worker cannot travel; says whose.
        ConfigurationError: This worker is not among ``workers``.
    """
    outcome = _gather(value, workers, timeout, _ALL_GATHER)
    for call in outcome.calls.values():
        call.wait()
    return outcome.values


def members(agent: Agent, workers: Iterable[Destination] | None) -> list[Peer]:
    """Returns the workers that are meant: those named, or all.

    Raises:
        UnknownWorker: There is no worker of a name or rank.
    """
    return agent.members.present() if workers is None else [agent.find(each) for each in workers]


def _gather(
    value: Any, workers: Iterable[Destination] | None, timeout: float, ways: Ways
) -> Outcome:
    agent = current()
    limit_s = limit_of(timeout, agent.default_timeout_s)
    limit_s = min(limit_s, remaining_time())  # In a call of another worker, no longer than that.
    limits = Limits(0.0 if math.isinf(limit_s) else limit_s, limit_s)
    return current_gatherings().gather(value, members(agent, workers), ways, limits)


# What the workers call on one another.


@remotely_callable
def bring(key: Key, name: str, value: Any) -> None:
    """Notes, on the worker that leads, that another one has come."""
    caller = strict_caller()
    if caller is not None:
        check_key(key, current(), caller, name)
    current_gatherings().led.brought(key, name, value)


@remotely_callable
def tell(key: Key, values: dict[str, Any]) -> None:
    """Notes that all have come, and what they brought."""
    caller = strict_caller()
    if caller is not None:
        check_key(key, current(), caller)
        check_types(values=(values, dict))
    current_gatherings().told(key, values)


_BARRIER = Ways("barrier", bring, tell)
_ALL_GATHER = Ways("all_gather", bring, tell)
