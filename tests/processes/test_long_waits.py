"""A long wait is logged while it lasts, and ends when the missing worker takes part."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torchweft
from torchweft import knobs, rpc
from torchweft.launch import Nursery, cluster

NOTICE_S = 0.2

_gate = threading.Event()


def wait_at_gate() -> None:
    _gate.wait()


def open_gate() -> None:
    _gate.set()


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        _gate.wait()
        return gradient * 2


def held(value: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Held.apply(value)
    return result


class Told(logging.Handler):
    """Performs the awaited action as soon as the wait is logged."""

    def __init__(self, helper: ThreadPoolExecutor) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.action: Callable[[], object] = lambda: None
        self._helper = helper

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self._helper.submit(self.action)


@pytest.fixture
def told() -> Iterator[Told]:
    with ThreadPoolExecutor(1) as helper, knobs.WAIT_NOTICE_S.override(NOTICE_S):
        handler = Told(helper)
        logging.getLogger("torchweft").addHandler(handler)
        yield handler
        logging.getLogger("torchweft").removeHandler(handler)


def test_waits_for_others_are_told_of(nursery: Nursery, told: Told) -> None:
    with cluster(workers=2, nursery=nursery):
        everybody = ["driver", "worker0", "worker1"]
        first = rpc.rpc_async("worker0", rpc.barrier, args=(everybody,))
        told.action = lambda: rpc.rpc_async("worker1", rpc.barrier, args=(everybody,))
        rpc.barrier(everybody)
        first.wait()
        told.action = lambda: rpc.rpc_async("worker1", open_gate)
        parameter = torch.ones(2, requires_grad=True)
        with torchweft.autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", held, args=(parameter,)).sum()
            torchweft.autograd.backward(context_id, [loss])
            gradient = torchweft.autograd.get_gradients(context_id)[parameter]
        assert gradient.tolist() == [2.0, 2.0]
        told.action = lambda: rpc.rpc_async("worker0", open_gate)
        rpc.rpc_async("worker0", wait_at_gate)
        rpc.shutdown()
    barrier, backward, shutdown = (text.partition(" s in ")[2] for text in told.messages[-3:])
    assert barrier == "barrier for 'worker1'"
    assert backward == "a backward pass for worker 'worker1'"
    assert (
        shutdown == "shutdown, serving meanwhile: workers 'driver', 'worker0' had calls under way"
    )
