"""Values that workers send to ports of one another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchweft
from torchweft import rpc
from torchweft.engine.worker.current import current
from torchweft.errors import ConfigurationError, SerializationError
from torchweft.launch import Nursery
from torchweft.rpc.ports import PORTS, Ports

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
PORT = 77
LIMIT_S = 20.0


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=2, nursery=nursery):
        yield


_mail: queue.SimpleQueue[Any] = queue.SimpleQueue()


def ports() -> Ports:
    return current().slots[PORTS]


def open_port() -> None:
    ports().open(PORT, lambda peer, frame: _mail.put((peer, frame)))


def close_port() -> None:
    ports().close(PORT)


def read(count: int) -> list[Any]:
    """Returns what came to the port of this worker, in order."""
    return [ports().read(*_mail.get(timeout=LIMIT_S)) for _ in range(count)]


def forward(to: str, values: Any, head: bytes = b"") -> None:
    """Sends values on to the port of another worker."""
    agent = current()
    agent.slots[PORTS].post(agent.find(to), PORT, head, values)


@pytest.fixture
def port() -> Iterator[None]:
    rpc.rpc_sync("worker1", open_port)
    yield
    rpc.rpc_sync("worker1", close_port)


VALUES: list[tuple[Any, ...]] = [
    (),
    (1, None, "text", 2.5, True),
    (torch.arange(6.0).reshape(2, 3), 3),
    (torch.arange(6.0).reshape(2, 3).T, [torch.ones(2), {"a": torch.zeros(1)}]),
    (torch.arange(300_000.0), "tables"),
    (torch.eye(3).to_sparse(),),
    (torch.arange(6.0).reshape(2, 3),),
    (torch.arange(6.0).reshape(2, 3).T, torch.ones(()), torch.zeros(0)),
    (torch.arange(300_000.0),),
    (torch.ones(2, requires_grad=True),),
]


@pytest.mark.usefixtures("port")
def test_values_of_one_sender_arrive_in_order_as_they_were() -> None:
    for number, values in enumerate(VALUES):
        forward("worker1", values, bytes(number))
    all_found = rpc.rpc_sync("worker1", read, (len(VALUES),))
    for number, ((head, found), values) in enumerate(zip(all_found, VALUES, strict=True)):
        assert head == bytes(number)
        assert len(found) == len(values)
        for one, other in zip(found, values, strict=True):
            if isinstance(other, torch.Tensor):
                assert torch.equal(one.to_dense(), other.to_dense())
                assert one.requires_grad == other.requires_grad
            elif not isinstance(other, list):
                assert one == other


def test_values_for_a_port_that_is_not_open_are_dropped() -> None:
    before = rpc.rpc_sync("worker0", torch.ones, (2,))
    forward("worker0", (torch.arange(300_000.0), [before]))
    assert rpc.rpc_sync("worker0", torch.add, (before, before)).tolist() == [2.0, 2.0]


def test_mistakes() -> None:
    own = ports()
    own.open(PORT, lambda *_: None)
    with pytest.raises(ConfigurationError, match="port 77 of this worker is open already"):
        own.open(PORT, lambda *_: None)
    own.close(PORT)
    own.close(PORT)
    with pytest.raises(SerializationError):
        forward("worker0", (1, threading.Lock()))
