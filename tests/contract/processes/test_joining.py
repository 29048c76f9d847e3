"""``init_rpc``: init methods, options and errors; each group here has one worker."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.contract.processes import functions
from tests.contract.processes.functions import wait_until
from torchweft import rpc
from torchweft.errors import (
    ConfigurationError,
    NotInitialized,
    ReferenceGone,
    RendezvousTimeout,
)
from torchweft.secret import Secret


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
        ({"init_method": "env://"}, "MASTER_ADDR and MASTER_PORT not set.*torchweft run"),
        ({"init_method": "env://", "store": HashStore()}, "not both"),
        (
            {
                "store": HashStore(),
                "listen": "no.such.address.invalid",
                "secret": Secret(b"sixteen bytes at least"),
            },
            "cannot listen on",
        ),
    ],
)
def test_options_that_cannot_work(
    values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match=message):
        rpc.init_rpc(
            "me", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(**values)
        )
    assert_not_joined()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "", "rank": 0, "world_size": 1}, "'' is no name"),
        ({"name": 5, "rank": 0, "world_size": 1}, "5 is no name"),
        ({"name": "a\nb", "rank": 0, "world_size": 1}, "is no name"),
        ({"rank": 2, "world_size": 2}, "rank 2 does not fit world_size 2"),
        ({"rank": -2, "world_size": 1}, "rank -2 does not fit world_size 1"),
        ({"world_size": 2}, "rank is not given.*RANK is not set"),
        ({"rank": -5}, "rank -5 does not fit world_size None; ranks go from 0 on"),
        (
            {"rank": 0, "world_size": 1, "rpc_backend_options": {"rpc_timeout": 1}},
            "RpcBackendOptions",
        ),
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
    assert 0.29 <= caught.value.elapsed_s <= time.monotonic() - start_s < 3.0
    assert_not_joined()


# The first TCP store of a process leaves a pipe of its event loop open for ever.
@pytest.mark.keeps("descriptors")
def test_after_a_failed_join_the_store_is_kept_until_the_shutdown() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", init_timeout=0.1)
    with pytest.raises(RendezvousTimeout):
        rpc.init_rpc("alone", rank=0, world_size=2, rpc_backend_options=options)
    socket.create_connection(("127.0.0.1", port)).close()
    rpc.shutdown()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


def test_nobody_hosts_the_store() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", init_timeout=1.0)
        with pytest.raises(RendezvousTimeout, match=r"is rank 0 running\?") as caught:
            rpc.init_rpc("me", rank=1, world_size=2, rpc_backend_options=options)
    assert caught.value.missing == (0,)
    assert_not_joined()


# The first TCP store of a process leaves a pipe of its event loop open for ever.
@pytest.mark.keeps("descriptors")
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


def join_alone() -> None:
    rpc.init_rpc("alone", None, 0, 1, rpc.RpcBackendOptions(store=HashStore()))


def use_reference_in_another_group() -> None:
    join_alone()
    old = rpc.RRef(functions.Tracked("old"))
    rpc.shutdown()
    join_alone()
    new = rpc.RRef(functions.Tracked("new"))
    assert new.id == old.id
    for use in (
        old.owner,
        old.is_owner,
        old.to_here,
        old.local_value,
        lambda: old.rpc_sync().get(),
        lambda: rpc.rpc_sync("alone", functions.identity, args=(old,)),
    ):
        with pytest.raises(ReferenceGone, match="group that has been shut down"):
            use()
    assert new.to_here().content == "new"


def test_references_of_an_earlier_group() -> None:
    try:
        use_reference_in_another_group()
    finally:
        rpc.shutdown()
    wait_until(lambda: functions.count_tracked() == 0, lambda: "values of former groups live")
