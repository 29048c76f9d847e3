"""References under ``torchweft.compat``: features of PyTorch's beyond the documented API.

The ``group`` fixture checks after every test that no worker has kept a reference.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes import functions
from tests.contract.processes.functions import Tracked, options
from torchweft import rpc
from torchweft.compat.rpc import PyRRef, RRef, api
from torchweft.errors import CallTimeout, SerializationError
from torchweft.launch import Cluster, Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors")


@pytest.fixture(scope="module")
def shared_group(nursery: Nursery) -> Iterator[Cluster]:
    compat = options(reference_type=RRef)  # type: ignore[arg-type]
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=compat) as group:
        yield group


@contextlib.contextmanager
def unmade(owner: str, gate: str, **limits: float) -> Iterator[Any]:
    """A reference to a value that is made when the block ends."""
    reference = api.remote(owner, functions.pass_gate, (gate, 7), **limits)
    try:
        yield reference
    finally:
        rpc.rpc_sync(owner, functions.open_gate, args=(gate,))
        rpc.RRef.to_here(reference)


def type_name(reference: Any) -> str:
    return type(reference).__module__


def test_every_reference_of_such_a_worker_is_of_this_type(group: Cluster) -> None:
    assert PyRRef is RRef
    made = api.remote("worker0", Tracked)
    assert type(made) is type(RRef(1)) is RRef
    assert isinstance(rpc.rpc_sync("worker0", functions.make_reference), RRef)
    for owner in ("worker0", "worker1"):  # To its owner, and to a third worker.
        assert rpc.rpc_sync(owner, type_name, args=(made,)) == RRef.__module__
    assert rpc.rpc_sync("worker0", type_name, args=([made],)) == "builtins"


def test_the_type_of_a_value_is_asked_once(group: Cluster) -> None:
    reference = api.remote("worker0", Tracked)
    assert reference._get_type() is Tracked
    future = reference._get_type(blocking=False)
    assert future is reference._get_type(blocking=False)
    assert future.wait() is Tracked
    assert RRef(1.5)._get_type() is float
    assert RRef(1.5)._get_type(blocking=False).wait() is float


def test_the_type_of_a_value_that_cannot_be_made(group: Cluster) -> None:
    failing = api.remote("worker0", functions.fail, (KeyError("why"),))
    for _ in range(2):
        with pytest.raises(KeyError, match="why"):
            failing._get_type()
        with pytest.raises(KeyError, match="why"):
            failing._get_type(blocking=False).wait()
    for owner in ("worker0", "driver"):
        with unmade(owner, "type") as slow:
            with pytest.raises(CallTimeout, match="RPC ran for more than"):
                slow._get_type(timeout=0.05)
            with pytest.raises(CallTimeout, match="RPC ran for more than"):
                slow._get_type(timeout=0.05, blocking=False).wait()
        assert slow._get_type() is int


@pytest.mark.parametrize("owner", ["worker0", "driver"])
def test_a_time_limit_of_remote_is_that_of_the_creation(group: Cluster, owner: str) -> None:
    too_late = pytest.raises(CallTimeout, match="RPC ran for more than")
    with unmade(owner, "creation", timeout=0.05) as slow, too_late:
        slow._get_future().wait()
    # The value has come meanwhile, but too late.
    for use in (
        slow.to_here,
        slow._serialize,
        lambda: rpc.rpc_sync(owner, functions.identity, args=(slow,)),
        lambda: rpc.rpc_sync("worker1", functions.identity, args=([slow],)),
    ):
        with pytest.raises(CallTimeout, match=f"RRef creation on worker '{owner}' was given up"):
            use()


def test_a_value_that_is_made_in_time(group: Cluster) -> None:
    for limits in ({}, {"timeout": 10.0}, {"timeout": 0.0}):
        made = api.remote("worker0", functions.identity, (5,), **limits)
        assert made._get_future() is made._get_future()
        made._get_future().wait()
        assert made.to_here() == 5
    failing = api.remote("worker0", functions.fail, (KeyError("why"),), timeout=10.0)
    failing._get_future().wait()
    with pytest.raises(KeyError, match="why"):
        failing.to_here()


def test_wait_all_waits_for_proxies_too(group: Cluster) -> None:
    reference = api.remote("worker0", functions.Accumulator, (1.0,))
    with pytest.raises(LookupError, match=r"at 1\.0"), api._wait_all():
        reference.rpc_async().fail()
    with api._wait_all():
        futures = [reference.rpc_async().add(1.0), api.rpc_async("worker0", functions.name_here)]
    assert all(future.done() for future in futures)


def test_confirmation_of_a_reference_in_a_message_is_waited_for(group: Cluster) -> None:
    made = api.remote("worker0", Tracked)
    for _ in range(3):
        assert rpc.rpc_sync("worker1", functions.is_confirmed, args=(made,))


def test_a_reference_does_not_travel_by_itself(group: Cluster) -> None:
    reference = api.remote("worker0", Tracked)
    with pytest.raises(SerializationError, match="cannot be serialized by itself"):
        reference._serialize()
    with pytest.raises(SerializationError, match="can only be received"):
        RRef._deserialize(b"")
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
        pickle.dumps(reference)


def test_backward_says_what_it_needs(group: Cluster) -> None:
    reference = api.remote("worker0", functions.identity, (torch.ones(1),))
    with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id'"):
        reference.backward()
    with pytest.raises(RuntimeError, match="RRef should contain a tensor"):
        RRef("text").backward()
