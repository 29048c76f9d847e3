"""The hooks for applications, at a strict worker."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.fuzz.strict.world import World
from tests.unit.engine.worker.group import group_of
from torchweft import extending, rpc
from torchweft.engine.codec import registry
from torchweft.engine.worker import current as current_agent
from torchweft.engine.worker.calls import current_call
from torchweft.errors import ConfigurationError, NotAllowed, NotInitialized, UnknownWorker

LIMIT_S = 20.0


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.fixture
def alone() -> Iterator[None]:
    """A worker with threads, alone in its group."""
    with group_of(1) as (member,):
        current_agent.install(member.agent)
        yield
        current_agent.install(None)


@rpc.register
def registered() -> None:
    """Is registered."""


def not_registered() -> None:
    """Is not."""


def test_the_workers_of_a_group(world: World) -> None:
    me, other = extending.this_worker(), extending.find_worker(world.sender.name)
    assert me.is_self
    assert not other.is_self
    assert [each.name for each in extending.present_workers()] == ["me", "sender", "other"]
    assert extending.find_worker(other.info) is extending.find_worker(other.info.id) is other
    assert extending.worker_of(other.id) is other
    assert other.lost is None
    assert me.host == me.name, "it has not said on which host it is"
    assert rpc.RRef(1).id.owner == me.id
    with pytest.raises(UnknownWorker):
        extending.find_worker("nobody")


COUNTS: extending.PerWorker[list[int]] = extending.PerWorker(list)


def test_a_finalizer_may_start_work(alone: None) -> None:
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    dropped = torch.nn.Linear(1, 1)
    weakref.finalize(dropped, extending.run_in_background, done.put, "ended")
    del dropped
    gc.collect()
    assert done.get(timeout=LIMIT_S) == "ended"


def test_the_caller(world: World) -> None:
    assert extending.caller() is extending.this_worker()
    token: Any = current_call.set(SimpleNamespace(peer=world.sender))  # type: ignore[arg-type]
    try:
        assert extending.caller() is world.sender
        assert extending.serves_another_strictly()
    finally:
        current_call.reset(token)


def test_a_strict_worker_accepts_what_is_registered(world: World) -> None:
    extending.check_called(registered)
    with pytest.raises(NotAllowed, match="not_registered"):
        extending.check_called(not_registered)


class Point(NamedTuple):
    x: int
    y: int


def test_marks_stand_where_they_may() -> None:
    assert extending.rebuilds_plain(Point) is Point
    assert registry.rebuilds_plain.has(f"{__name__}:Point")
    with pytest.raises(ConfigurationError, match="may not be marked"):
        extending.rebuilds_plain(extending.PerWorker)
    with pytest.raises(ConfigurationError, match="may not be marked"):
        registry.remotely_callable(registered)


def test_a_thread_works_for_a_call(world: World) -> None:
    call = SimpleNamespace(peer=world.sender)
    token: Any = current_call.set(call)  # type: ignore[arg-type]
    assert extending.served_call() is call
    current_call.reset(token)
    assert extending.served_call() is None
    with extending.working_for(call):
        assert world.worker.serving[threading.get_ident()] is call
    assert threading.get_ident() not in world.worker.serving


def test_threads_of_a_component_outlive_the_worker() -> None:
    with extending.working_for(None), extending.waiting(list), pytest.raises(NotInitialized):
        extending.this_worker()
