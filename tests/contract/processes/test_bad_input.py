"""Wrong arguments and callables give typed errors, strangers are refused; all workers go on."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes import functions
from torchweft import rpc
from torchweft.agent.current import current
from torchweft.errors import (
    AlreadyInitialized,
    ArgumentTypeError,
    ConfigurationError,
    SerializationError,
    UnknownFunction,
    UnknownWorker,
)
from torchweft.launch import Cluster
from torchweft.transport import addresses
from torchweft.wire.frames import encode_frame
from torchweft.wire.messages import Kind

pytestmark = pytest.mark.keeps("threads", "descriptors")
STARTERS = [rpc.rpc_sync, rpc.rpc_async, rpc.remote]


def assert_all_work() -> None:
    for name in ("worker0", "worker1", "driver"):
        assert rpc.rpc_sync(name, functions.name_here, timeout=5) == name


# Calls


@pytest.mark.parametrize("start", STARTERS)
@pytest.mark.parametrize("to", ["nobody", 3, -1, rpc.WorkerInfo("worker0", 2)])
def test_an_unknown_destination(group: Cluster, start: Any, to: Any) -> None:
    with pytest.raises(UnknownWorker) as caught:
        start(to, functions.name_here)
    assert repr(to) in str(caught.value)
    assert "'driver' (0), 'worker0' (1), 'worker1' (2)" in str(caught.value)
    assert isinstance(caught.value, (RuntimeError, ValueError))
    assert_all_work()


@pytest.mark.parametrize("start", STARTERS)
@pytest.mark.parametrize("to", [None, 1.5, ["x"]])
def test_a_destination_of_a_wrong_type(group: Cluster, start: Any, to: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^to is .*pass the name of a worker"):
        start(to, functions.name_here)
    assert_all_work()


@pytest.mark.parametrize("start", STARTERS)
def test_what_cannot_be_called(group: Cluster, start: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"func is 5, an int; pass the function itself"):
        start("worker0", 5)
    with pytest.raises(ConfigurationError, match=r"args=\(value,\)"):
        start("worker0", functions.identity, args=torch.ones(2))
    with pytest.raises(ConfigurationError, match="kwargs"):
        start("worker0", functions.identity, kwargs=[("value", 1)])
    assert_all_work()


@pytest.mark.parametrize("start", STARTERS)
def test_arguments_that_cannot_travel(group: Cluster, start: Any) -> None:
    argument = {"deep": [threading.Lock()]}
    with pytest.raises(SerializationError, match="lock") as caught:
        start("worker0", functions.identity, args=(argument,))
    assert "deep" in str(caught.value)
    assert_all_work()


def test_results_that_cannot_travel(group: Cluster) -> None:
    with pytest.raises(SerializationError, match="lock"):
        rpc.rpc_sync("worker0", functions.make_lock)
    with pytest.raises(SerializationError, match="lock"):
        rpc.remote("worker0", functions.make_lock).to_here()
    assert_all_work()


def test_an_argument_that_cannot_be_rebuilt(group: Cluster) -> None:
    with pytest.raises(SerializationError, match="cannot be rebuilt"):
        rpc.rpc_sync("worker0", functions.identity, args=(functions.Unreadable(),))
    with pytest.raises(SerializationError, match="cannot be rebuilt"):
        rpc.rpc_sync("worker0", functions.Unreadable)
    assert_all_work()


@pytest.fixture
def missing_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that no worker can import."""
    module = types.ModuleType("only_here")
    exec("def work(): return 1\nclass Thing: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    return module


def test_a_function_that_the_callee_lacks(
    group: Cluster, missing_module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownFunction, match=r"'work' in module 'only_here'.*importable"):
        rpc.rpc_sync("worker0", missing_module.work)
    with pytest.raises(UnknownFunction, match="'Thing' in module 'only_here'"):
        rpc.rpc_sync("worker0", functions.identity, args=(missing_module.Thing(),))

    def added() -> None: ...

    added.__module__, added.__qualname__ = functions.__name__, "added"
    monkeypatch.setattr(functions, "added", added, raising=False)
    with pytest.raises(AttributeError, match=rf"'added' in module '{functions.__name__}'"):
        rpc.remote("worker0", added).to_here()
    assert_all_work()


def test_wrong_arguments_of_the_function(group: Cluster) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        rpc.rpc_sync("worker0", functions.add, args=(1,))
    with pytest.raises(TypeError, match="unexpected keyword"):
        rpc.rpc_async("worker0", functions.add, kwargs={"third": 1}).wait()
    assert_all_work()


def test_a_second_init(group: Cluster) -> None:
    with pytest.raises(AlreadyInitialized, match=r"is worker 'driver'.*shutdown\(\)"):
        rpc.init_rpc("again", rank=0, world_size=1)
    assert_all_work()


# Strangers


def _partial_greeting() -> bytes:
    return b"".join(bytes(part) for part in encode_frame(Kind.HELLO, 0, 0, b'{"worker": 1'))[:-5]


def _greeting(**fields: Any) -> bytes:
    content = {"worker": 1, "token": "guessed", "refusal": "", "facts": {}, "version": 1, **fields}
    return b"".join(
        bytes(part) for part in encode_frame(Kind.HELLO, 0, 0, json.dumps(content).encode())
    )


def _hello(text: bytes) -> bytes:
    return b"".join(bytes(part) for part in encode_frame(Kind.HELLO, 0, 0, text))


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4,
    os.urandom(4096),
    b"\xff" * 64,
    _greeting(),
    _greeting(token="\ud800"),
    _greeting(token=5),
    _greeting(version=99),
    _greeting(worker="x"),
    _hello(b"[" * 100_000),
    _hello(b"null"),
    _hello(b'{"worker": 1}'),
    _hello(b""),
]


def listeners_of(name: str) -> list[addresses.Address]:
    return [addresses.parse(text) for text in current().find(name).registration.addresses]


def is_closed(connection: socket.socket, limit_s: float) -> bool:
    connection.settimeout(limit_s)
    try:
        while connection.recv(4096):
            pass  # A challenge, and perhaps a refusal because the greeting proved nothing.
        return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.fixture
def connections() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_a_stranger_is_turned_away(
    group: Cluster, content: bytes, connections: contextlib.ExitStack
) -> None:
    for address in listeners_of("worker0"):
        connection = connections.enter_context(addresses.dial(address, 1.0))
        connection.sendall(content)
        assert is_closed(connection, 2.0)
    assert_all_work()


def test_silent_strangers_hold_nobody_up(group: Cluster, connections: contextlib.ExitStack) -> None:
    for address in listeners_of("worker0") * 4:
        connections.enter_context(addresses.dial(address, 1.0))
        half = connections.enter_context(addresses.dial(address, 1.0))
        half.sendall(_partial_greeting())
    start_s = time.monotonic()
    for _ in range(20):
        assert_all_work()
    assert rpc.rpc_sync("worker0", functions.bounce, args=(10, ["worker0", "worker1"])) == 10
    assert time.monotonic() - start_s < 8.0  # Each stranger has ten seconds.


def test_a_worker_starts_no_cluster_of_its_own(group: Cluster) -> None:
    with pytest.raises(AlreadyInitialized, match="already initialized"):
        torchweft.cluster(workers=1).start()
    assert rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), 1)).item() == 2.0
