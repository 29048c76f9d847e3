"""The functions that the leader of a trace calls on the other workers.

They tell names of functions, numbers, sizes and times, which any member may see by observing; they
read and return no value of the program. So a strict worker runs them as well.
"""

from __future__ import annotations

import time
from typing import Any

from torchweft.errors import ConfigurationError
from torchweft.protocol.observing.trace import Row
from torchweft.rpc.current_call import check_types
from torchweft.rpc.node import current_node
from torchweft.rpc.tracing.recorder import RECORDER
from torchweft.serialize.registry import remotely_callable
from torchweft.worker.agent import Agent
from torchweft.worker.calls import current_call
from torchweft.worker.current import current

MOST_ROWS = 5_000_000
"""Records that a worker keeps at most, about 350 bytes each."""
BATCH = 20_000
"""Records in one answer."""


@remotely_callable
def read_clock() -> tuple[str, float]:
    """Returns the id of this worker's clock, and its time."""
    return current_node().clock_id, time.monotonic()


@remotely_callable
def begin(trace: int, limit: int, profiles: bool) -> None:
    """Has this worker record what it does."""
    check_types(trace=(trace, int), limit=(limit, int), profiles=(profiles, bool))
    if not 0 < limit <= MOST_ROWS:
        raise ConfigurationError(f"limit is {limit}; a worker keeps 1 to {MOST_ROWS} records")
    agent = current()
    agent.slots[RECORDER].begin(trace, _caller(agent), limit, profiles=profiles)


def _caller(agent: Agent) -> int:
    served = current_call.get()
    # The leader calls them directly for its own worker, perhaps within a call that it serves.
    is_asked = served is not None and served.function in _NAMES
    return int(served.peer.id) if served is not None and is_asked else agent.me.id


@remotely_callable
def end(trace: int) -> dict[str, Any]:
    """Has this worker stop recording; returns what it says about the recording."""
    check_types(trace=(trace, int))
    agent = current()
    return agent.slots[RECORDER].end(trace, _caller(agent))


@remotely_callable
def take(trace: int) -> tuple[list[Row], list[Row]]:
    """Returns the next rows of a recording that has ended, and of ``torch.profiler``."""
    check_types(trace=(trace, int))
    agent = current()
    return agent.slots[RECORDER].take(trace, _caller(agent), BATCH)


@remotely_callable
def forget(trace: int) -> None:
    """Has this worker stop recording, and drop the recording."""
    check_types(trace=(trace, int))
    agent = current()
    agent.slots[RECORDER].forget(trace, _caller(agent))


_ASKED = (begin, end, take, forget)
_NAMES = frozenset({*_ASKED, *(f"{__name__}:{each.__name__}".encode() for each in _ASKED)})
"""What a call of another worker may have called."""
