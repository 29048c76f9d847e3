"""Groups whose large tensors travel over data connections, and queries of those connections."""

from __future__ import annotations

import threading

import torch

from tests.contract.processes import functions
from tests.internal import overridden
from tests.memory_counts import first_for
from tests.processes import internals
from torchweft import rpc
from torchweft.engine.channels.stripes import Arrivals, Outbox, Stripes
from torchweft.engine.worker.current import current

STRIPE = 1 << 18
FROM = 1 << 19


SETTINGS = overridden(
    SHM_FROM_BYTES=1 << 60,
    CMA_FROM_BYTES=1 << 60,
    STRIPED_FROM_BYTES=FROM,
    STRIPE_BYTES=STRIPE,
    UNIX_SOCKETS=0,
)
"""The environment of workers that share no memory, as on two hosts."""


def data_connections() -> Stripes:
    return current().channels.of(Stripes)


def way_to(name: str, size_bytes: int) -> str:
    return first_for(current().find(name).ways, size_bytes)


def connections_with(name: str) -> tuple[int, int]:
    """Returns how many data connections lead to a worker, and how many come from it."""
    data = data_connections()._of(current().find(name))
    sending = [] if data.sending is None else data.sending.connections
    return len(sending), len(data.receiving)


def arrivals_from(name: str) -> Arrivals:
    return data_connections()._of(current().find(name)).arrivals


def outbox_to(name: str) -> Outbox:
    sending = data_connections()._of(current().find(name)).sending
    assert sending is not None
    return sending


def transfers_from(name: str) -> int:
    return len(arrivals_from(name).under_way)


def await_verdicts(name: str) -> None:
    """Connects, and waits until both sides know what the other can receive."""

    def are_here() -> bool:
        theirs = rpc.rpc_sync(name, way_to, args=(rpc.get_worker_info().name, FROM))
        return way_to(name, FROM) == theirs == "striped"

    functions.wait_until(are_here, lambda: "the other side does not say what it can receive")


def connect_data(name: str) -> None:
    """Makes both sides open their data connections."""
    await_verdicts(name)
    rpc.rpc_sync(name, functions.identity, args=(bytes_of(FROM),))


def data_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "-data-" in thread.name]


def bytes_of(size_bytes: int) -> torch.Tensor:
    return internals.make_tensor(size_bytes)


def count_elements(tensor: torch.Tensor) -> int:
    return tensor.numel()


def ones(size_bytes: int) -> torch.Tensor:
    return torch.ones(size_bytes, dtype=torch.uint8)
