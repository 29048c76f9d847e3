"""Fault injection: a worker's real messages fail or are late, and the guarantees hold."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

import torchweft
from tests.conformance.shims.fault_plan import Plan
from tests.conformance.shims.faults import Faults
from tests.contract.processes import functions
from tests.contract.processes.functions import Tracked, options, wait_until
from torchweft import autograd, rpc
from torchweft.compat.rpc import RRef, api
from torchweft.errors import CallTimeout, ReferenceGone
from torchweft.launch import Nursery
from torchweft.rpc.worker import current_worker

DELAY_S = 0.3


@contextlib.contextmanager
def faulty(
    nursery: Nursery,
    fail: Sequence[str] = (),
    delay: Mapping[str, float] | None = None,
    fail_sends: int = 2,
) -> Iterator[Faults]:
    """A group with faults injected at its driver."""
    compat = options(reference_type=RRef)  # type: ignore[arg-type]
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=compat):
        yield Faults(current_worker(), Plan(fail, delay or {}, fail_sends))


def await_end_on(worker: str) -> None:
    wait_until(
        lambda: rpc.rpc_sync(worker, functions.count_tracked) == 0,
        lambda: f"values live on {worker}",
    )


@contextlib.contextmanager
def takes(at_least_s: float) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s >= at_least_s


@pytest.mark.parametrize("to", ["worker0", "driver"])
def test_a_late_creation(nursery: Nursery, to: str) -> None:
    with faulty(nursery, delay={"PYTHON_REMOTE_CALL": DELAY_S}):
        late = api.remote(to, Tracked, (3,), timeout=0.05)
        with pytest.raises(CallTimeout, match="RPC ran for more than"):
            late._get_future().wait()
        with pytest.raises(CallTimeout, match="RRef creation"):
            late.to_here()
        with takes(DELAY_S / 2):
            assert api.remote(to, Tracked, (3,)).to_here().content == 3
        del late
        await_end_on(to)
        # Dropped before its value is made; the group's shutdown waits for it all the same.
        api.remote(to, Tracked, (4,))


COUNTING = ["RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE"]


@pytest.mark.parametrize("delay_s", [0.0, 0.1])
def test_references_are_counted_although_messages_are_lost(
    nursery: Nursery, delay_s: float
) -> None:
    fail = [] if delay_s else COUNTING
    with faulty(nursery, fail=fail, delay=dict.fromkeys(COUNTING, delay_s)):
        rpc.rpc_sync("worker0", functions.keep, args=("mine", RRef(Tracked(1))))
        rpc.rpc_sync("worker1", functions.keep, args=("mine", api.remote("worker0", Tracked)))
        # From its owner, from another user, and from this worker to both.
        got = [rpc.rpc_sync(f"worker{i}", functions.give, args=("mine",)) for i in range(2)]
        made = api.remote("worker0", Tracked, (5,))
        assert rpc.rpc_sync("worker1", functions.fetch_content, args=(made,)) == 5
        assert [reference.confirmed_by_owner() for reference in got] == [True, True]
        assert got[1].to_here().content is None
        del got, made
        for worker in ("worker0", "worker1"):
            rpc.rpc_sync(worker, functions.keep, args=("mine", None))
        for worker in ("driver", "worker0", "worker1"):
            await_end_on(worker)


@pytest.mark.parametrize("fail", [["CLEANUP_AUTOGRAD_CONTEXT_REQ"], []])
def test_contexts_end_although_messages_are_lost(nursery: Nursery, fail: list[str]) -> None:
    delay = {} if fail else {"CLEANUP_AUTOGRAD_CONTEXT_REQ": 0.1}
    with faulty(nursery, fail=fail, delay=delay):
        with autograd.context():
            rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1, requires_grad=True), 1))
            assert rpc.rpc_sync("worker0", count_contexts) == 1
        wait_until(
            lambda: rpc.rpc_sync("worker0", count_contexts) == 0, lambda: "a context lives on"
        )


def count_contexts() -> int:
    return len(current_worker().contexts._contexts)


def test_after_shutdown(nursery: Nursery) -> None:
    with faulty(nursery):
        reference: Any = api.remote("worker0", Tracked)
        assert "UserRRef" in str(reference)
    assert "RRef" in str(reference)
    with pytest.raises(ReferenceGone, match=r"Cannot call to_here\(\) on it after deletion"):
        reference.to_here()
    with pytest.raises(ReferenceGone, match="Cannot call fork an UserRRef after deletion"):
        reference._serialize()
    with pytest.raises(RuntimeError, match="Current RPC agent is not set! Did you initialize"):
        RRef(1)
