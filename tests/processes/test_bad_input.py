"""Wrong arguments, callables that cannot travel, strangers: a typed error, and all else goes on."""

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
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.processes import functions
from tests.processes.functions import wait_until
from weft import rpc
from weft.agent.current import current
from weft.errors import (
    AlreadyInitialized,
    ConfigurationError,
    NotInitialized,
    RendezvousTimeout,
    SerializationError,
    UnknownFunction,
    UnknownWorker,
    WeftError,
)
from weft.launch import Cluster
from weft.rpc.worker import Worker
from weft.transport import addresses
from weft.transport.handshake import Greeting
from weft.wire.frames import encode_frame
from weft.wire.messages import Kind

shares_group = pytest.mark.keeps("threads", "descriptors")
STARTERS = [rpc.rpc_sync, rpc.rpc_async, rpc.remote]


def assert_all_work() -> None:
    for name in ("worker0", "worker1", "driver"):
        assert rpc.rpc_sync(name, functions.name_here, timeout=5) == name


# Calls


@shares_group
@pytest.mark.parametrize("start", STARTERS)
@pytest.mark.parametrize("to", ["nobody", 3, -1, None, 1.5, rpc.WorkerInfo("worker0", 2), ["x"]])
def test_an_unknown_destination(group: Cluster, start: Any, to: Any) -> None:
    with pytest.raises(UnknownWorker) as caught:
        start(to, functions.name_here)
    assert repr(to) in str(caught.value)
    assert "'driver' (0), 'worker0' (1), 'worker1' (2)" in str(caught.value)
    assert isinstance(caught.value, (RuntimeError, ValueError))
    assert_all_work()


@shares_group
@pytest.mark.parametrize("start", STARTERS)
def test_what_cannot_be_called(group: Cluster, start: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"func is 5, a int that cannot be called"):
        start("worker0", 5)
    with pytest.raises(ConfigurationError, match=r"args=\(value,\)"):
        start("worker0", functions.identity, args=torch.ones(2))
    with pytest.raises(ConfigurationError, match="kwargs"):
        start("worker0", functions.identity, kwargs=[("value", 1)])
    assert_all_work()


@shares_group
@pytest.mark.parametrize("start", STARTERS)
def test_arguments_that_cannot_travel(group: Cluster, start: Any) -> None:
    argument = {"deep": [threading.Lock()]}
    with pytest.raises(SerializationError, match="lock") as caught:
        start("worker0", functions.identity, args=(argument,))
    assert "deep" in str(caught.value)
    assert_all_work()


@shares_group
@pytest.mark.parametrize("make", [functions.make_lock, functions.make_meta_tensor])
def test_results_that_cannot_travel(group: Cluster, make: Any) -> None:
    with pytest.raises((SerializationError, WeftError)):
        rpc.rpc_sync("worker0", make, timeout=5)
    made = rpc.remote("worker0", make)
    with pytest.raises(WeftError):
        made.to_here(timeout=5)
    assert_all_work()


@shares_group
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


@shares_group
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


@shares_group
def test_wrong_arguments_of_the_function(group: Cluster) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        rpc.rpc_sync("worker0", functions.add, args=(1,))
    with pytest.raises(TypeError, match="unexpected keyword"):
        rpc.rpc_async("worker0", functions.add, kwargs={"third": 1}).wait()
    assert_all_work()


# Joining


@shares_group
def test_a_second_init(group: Cluster) -> None:
    with pytest.raises(AlreadyInitialized, match=r"is worker 'driver'.*shutdown\(\)"):
        rpc.init_rpc("again", rank=0, world_size=1)
    assert_all_work()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_worker_threads": 0}, "num_worker_threads is 0.*at least 1"),
        ({"num_worker_threads": "4"}, "num_worker_threads is '4'"),
        ({"rpc_timeout": -1}, "rpc_timeout is -1"),
        ({"rpc_timeout": float("nan")}, "rpc_timeout is nan"),
        ({"rpc_timeout": "1"}, "rpc_timeout is '1'"),
        ({"init_timeout": 0}, "init_timeout is 0"),
        ({"init_timeout": None}, "init_timeout is None"),
        ({"init_method": "udp://here"}, "'udp://here' is unknown; use env://"),
        ({"init_method": "env://"}, "MASTER_ADDR and MASTER_PORT not set.*weft run"),
        ({"init_method": "env://", "store": HashStore()}, "not both"),
        ({"store": HashStore(), "listen": "no.such.address.invalid"}, "cannot listen on"),
    ],
)
def test_options_that_cannot_work(
    values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match=message):
        rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(**values))
    assert_not_joined()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "", "rank": 0, "world_size": 1}, "'' is no name"),
        ({"name": 5, "rank": 0, "world_size": 1}, "5 is no name"),
        ({"name": "a\nb", "rank": 0, "world_size": 1}, "is no name"),
        ({"rank": 2, "world_size": 2}, "rank 2 does not fit world_size 2"),
        ({"world_size": 2}, "rank is not given.*RANK is not set"),
        ({"rank": 0}, "world_size is not given.*WORLD_SIZE is not set"),
        ({"rank": 0, "world_size": 1, "rpc_backend_options": {"rpc_timeout": 1}}, "RpcBackendOptions"),
    ],
)
def test_arguments_that_cannot_work(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match=message):
        rpc.init_rpc(**arguments)
    assert_not_joined()


def assert_not_joined() -> None:
    for use in (rpc.get_worker_info, lambda: rpc.RRef(1), lambda: rpc.rpc_sync("me", len)):
        with pytest.raises(NotInitialized, match="init_rpc"):
            use()
    rpc.shutdown()  # does nothing


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_never_comes(rank: int) -> None:
    options = rpc.RpcBackendOptions(store=HashStore(), init_timeout=0.3)
    start_s = time.monotonic()
    with pytest.raises(RendezvousTimeout, match=f"rank {1 - rank}") as caught:
        rpc.init_rpc("me", rank=rank, world_size=2, rpc_backend_options=options)
    assert caught.value.missing == (1 - rank,)
    assert 0.3 <= caught.value.elapsed_s <= time.monotonic() - start_s < 0.8
    assert_not_joined()


def test_nobody_hosts_the_store() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", init_timeout=1.0)
        with pytest.raises(RendezvousTimeout, match=r"is rank 0 running\?") as caught:
            rpc.init_rpc("me", rank=1, world_size=2, rpc_backend_options=options)
    assert caught.value.missing == (0,)
    assert_not_joined()


@pytest.mark.parametrize("method", ["tcp", "file", "env", "store"])
def test_every_init_method(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    options = {
        "tcp": rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}"),
        "file": rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/rendezvous"),
        "env": None,
        "store": rpc.RpcBackendOptions(store=HashStore()),
    }[method]
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        assert rpc.rpc_sync("alone", functions.name_here) == "alone"
        assert rpc.remote(0, functions.Tracked, args=(1,)).to_here().content == 1
    finally:
        rpc.shutdown()
    assert_not_joined()


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
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.fixture
def connections() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


@shares_group
@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_a_stranger_is_turned_away(
    group: Cluster, content: bytes, connections: contextlib.ExitStack
) -> None:
    for address in listeners_of("worker0"):
        connection = connections.enter_context(addresses.dial(address, 1.0))
        connection.sendall(content)
        assert is_closed(connection, 2.0)
    assert_all_work()


@shares_group
def test_silent_strangers_hold_nobody_up(
    group: Cluster, connections: contextlib.ExitStack
) -> None:
    for address in listeners_of("worker0") * 4:
        connections.enter_context(addresses.dial(address, 1.0))
        half = connections.enter_context(addresses.dial(address, 1.0))
        half.sendall(_partial_greeting())
    start_s = time.monotonic()
    for _ in range(20):
        assert_all_work()
    assert rpc.rpc_sync("worker0", functions.bounce, args=(10, ["worker0", "worker1"])) == 10
    assert time.monotonic() - start_s < 2.0


def test_references_of_an_earlier_group(nursery: Any) -> None:
    rpc.init_rpc("alone", 0, 0, 1, rpc.RpcBackendOptions(store=HashStore()))
    old = rpc.RRef(functions.Tracked("old"))
    rpc.shutdown()
    rpc.init_rpc("alone", 0, 0, 1, rpc.RpcBackendOptions(store=HashStore()))
    try:
        new = rpc.RRef(functions.Tracked("new"))
        assert new.id == old.id
        for use in (
            old.to_here,
            old.local_value,
            lambda: old.rpc_sync().get(),
            lambda: rpc.rpc_sync("alone", functions.identity, args=(old,)),
        ):
            with pytest.raises(WeftError, match="group that has been shut down"):
                use()
        assert new.to_here().content == "new"
    finally:
        rpc.shutdown()
    wait_until(lambda: functions.count_tracked() <= 2, lambda: "values live")
    assert Worker
