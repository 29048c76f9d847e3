"""An attacker controls the rendezvous store: workers get a typed error, the attacker nothing.

The store is PyTorch's ``TCPStore``, which admits every client; the test hosts it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.another_user import NOBODY, as_nobody
from tests.open_workers import OpenWorkers, WarmProcess
from tests.processes import strange_members
from torchweft import rpc, secret
from torchweft.engine.io import addresses
from torchweft.engine.io.handshake import Handshake, frame_with, new_voucher
from torchweft.errors import ProtocolError, RendezvousError, WorkerLost
from torchweft.secret import Secret

pytestmark = pytest.mark.keeps("threads", "descriptors", "processes")
LIMIT_S = 10.0
TOKEN = "0" * 32


@pytest.fixture(scope="module")
def warm(warm_process: WarmProcess) -> Iterator[OpenWorkers]:
    started = OpenWorkers(warm_process, "tests.processes.strange_members")
    yield started
    started.close()


class Store:
    """The attacker's store, and the workers that use it for their rendezvous."""

    def __init__(self, warm: OpenWorkers, folder: Path, number: int) -> None:
        self.keys = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=LIMIT_S))
        self._warm = warm
        self._folder = folder
        self._prefix = f"{folder.name} {number} "
        self._names: list[str] = []

    def begin(self, name: str, rank: int, size: int | None, *, has_secret: bool = True) -> None:
        self._names.append(name)
        path = self._folder / "secret"
        if not path.exists():
            secret.write_new(path)
        environment = {"WEFT_SECRET_FILE": str(path)} if has_secret else {}
        self._warm.begin(self._prefix + name, join, name, rank, size, self.keys.port, environment)

    def result(self, name: str) -> Any:
        return self._warm.result(self._prefix + name)

    def join(self, name: str, rank: int, size: int | None, *, has_secret: bool = True) -> None:
        self.begin(name, rank, size, has_secret=has_secret)
        self.result(name)

    def do(self, name: str, function: Any, *args: Any) -> Any:
        return self._warm.do(self._prefix + name, function, *args)

    def await_key(self, key: str) -> bytes:
        self.keys.wait([key], timedelta(seconds=LIMIT_S))
        return bytes(self.keys.get(key))

    def close(self) -> None:
        for name in self._names:
            self._warm.kill(self._prefix + name)


def join(name: str, rank: int, size: int | None, port: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
    options = rpc.RpcBackendOptions(store=store, init_timeout=LIMIT_S, rpc_timeout=LIMIT_S)
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)


def call(to: str) -> float:
    return float(rpc.rpc_sync(to, torch.add, (torch.ones(2), 1)).sum())


@pytest.fixture
def store(warm: OpenWorkers, tmp_path: Path) -> Iterator[Store]:
    made = Store(warm, tmp_path, 0)
    yield made
    made.close()


def registration(name: str, rank: int, address: str) -> dict[str, Any]:
    return {"name": name, "id": rank, "addresses": [address], "main": "", "facts": {}}


def directory(*workers: dict[str, Any]) -> str:
    return json.dumps({"token": TOKEN, "workers": workers, "refusal": "", "missing": []})


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """A listener to which no worker must connect."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener
        with pytest.raises(BlockingIOError):
            listener.accept()


def address_of(listener: socket.socket) -> str:
    return f"tcp:127.0.0.1:{listener.getsockname()[1]}"


# With a secret


def test_another_registration(store: Store, trap: socket.socket) -> None:
    store.begin("a", 0, 3)
    token = store.await_key("round").decode()[-32:]
    store.begin("b", 1, 3)
    store.keys.set(f"worker/2/{token}", json.dumps(registration("c", 2, address_of(trap))))
    for name in "ab":
        with pytest.raises(RendezvousError, match=r"'worker/2' was not written with the secret"):
            store.result(name)


def test_another_directory(store: Store, trap: socket.socket) -> None:
    store.begin("a", 0, 3)
    token = store.await_key("round").decode()[-32:]
    store.begin("b", 1, 3)
    mine = {"name": "b", "id": 1, "addresses": [], "main": "", "facts": {}}
    told = directory(registration("a", 0, address_of(trap)), mine)
    store.keys.set(f"directory/{token}", told)
    with pytest.raises(RendezvousError, match=r"'directory' was not written with the secret"):
        store.result("b")
    store.close()


def test_another_round(store: Store) -> None:
    store.keys.set("round", TOKEN)
    store.begin("b", 1, 2)
    store.await_key(f"worker/1/{TOKEN}")
    store.join("a", 0, 2)  # The attacker can delay it until a leader begins a round, and no more.
    store.result("b")
    assert store.do("b", call, "a") == 4.0


def test_the_directory_of_another_run(warm: OpenWorkers, tmp_path: Path) -> None:
    former, store = Store(warm, tmp_path, 1), Store(warm, tmp_path, 2)
    for name, rank in (("a", 0), ("b", 1)):
        former.begin(name, rank, 2)
    for name in "ab":
        former.result(name)
    assert former.do("b", call, "a") == 4.0
    for key in ("round", f"directory/{former.await_key('round').decode()[-32:]}"):
        store.keys.set(key, former.await_key(key))
    with pytest.raises(RendezvousError, match="does not have rank 1 as it registered"):
        store.join("b", 1, 2)
    former.close()
    store.close()


def test_another_token_of_an_open_group(store: Store) -> None:
    store.keys.set("kind", "open")
    with pytest.raises(RendezvousError, match="'kind' was not written with the secret"):
        store.join("a", 0, None)


def test_another_member_of_an_open_group(store: Store, trap: socket.socket) -> None:
    store.join("a", 0, None)
    token = store.await_key("token").decode()[-32:]
    store.keys.set("present", "[0, 0]")
    address = address_of(trap)
    store.keys.set(f"member/0/{token}", json.dumps(registration("a", 0, address)))
    with pytest.raises(RendezvousError, match=r"'member/0' was not written with the secret"):
        store.join("b", 1, None)
    store.keys.set("present", json.dumps([0, [0, json.dumps(registration("a", 0, address))]]))
    with pytest.raises(RendezvousError, match=r"'member/0' was not written with the secret"):
        store.join("b", 1, None)
    store.keys.set("present", "[0]")
    store.join("c", 2, None)  # The attacker can hide ``a`` from ``c``, and do no more.
    assert store.do("c", strange_members.state).members == ["c"]


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\xff" * 100, b"null", b'{"token": 1}'])
@pytest.mark.parametrize("has_secret", [True, False])
def test_nonsense(store: Store, content: bytes, has_secret: bool) -> None:
    store.keys.set("round", TOKEN)
    store.keys.set(f"directory/{TOKEN}", content)
    with pytest.raises(RendezvousError if has_secret else ProtocolError):
        store.join("b", 1, 2, has_secret=has_secret)


def test_a_worker_with_a_secret_and_one_without(store: Store) -> None:
    store.begin("b", 1, 2, has_secret=False)
    store.begin("a", 0, 2)
    with pytest.raises(RendezvousError, match="another secret or none"):
        store.result("a")
    with pytest.raises(RendezvousError, match="this worker has none"):
        store.result("b")


# Without a secret, the attacker has the token from the store, but another machine or user.


def misdirect(store: Store, address: str) -> None:
    """Makes a worker without a secret believe that another worker is at an address."""
    store.keys.set("round", TOKEN)
    store.begin("b", 1, 2, has_secret=False)
    own = json.loads(store.await_key(f"worker/1/{TOKEN}"))
    store.keys.set(f"directory/{TOKEN}", directory(registration("a", 0, address), own))
    store.result("b")


def test_without_a_secret_another_machine_is_not_dialled(store: Store) -> None:
    misdirect(store, "tcp:198.18.77.1:4000")
    with pytest.raises(
        WorkerLost, match="without a secret, a worker connects to others of its own"
    ):
        store.do("b", call, "a")


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_without_a_secret_another_user_is_not_talked_to(store: Store, kind: str) -> None:
    with as_nobody():
        if kind == "unix":
            listener, address = addresses.listen_unix()
        else:
            listener, address = addresses.listen_tcp("127.0.0.1")
    with listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(LIMIT_S)
        misdirect(store, str(address))
        called = pool.submit(store.do, "b", call, "a")
        with as_nobody():  # The accepting user owns its end of the connection.
            connection, _ = listener.accept()
        with connection:
            key = Secret(TOKEN.encode())
            Handshake.accept(connection, key, time.monotonic() + LIMIT_S)
            connection.settimeout(LIMIT_S)
            said = b""
            while part := connection.recv(4096):
                said += part
            # It has sent its voucher before the kernel could name the user, and nothing else.
            assert len(said) == len(frame_with(new_voucher(key, 0)))
        with pytest.raises(WorkerLost, match=f"user {NOBODY} is at the other end"):
            called.result(LIMIT_S)


def test_without_a_secret_another_user_is_not_let_in(store: Store) -> None:
    store.join("a", 0, 1, has_secret=False)
    own = json.loads(store.await_key(f"worker/0/{store.await_key('round').decode()}"))
    for address in map(addresses.parse, own["addresses"]):
        with addresses.dial(address, LIMIT_S) as connection:
            assert connection.recv(4096) != b""
        with as_nobody():
            connection = addresses.dial(address, LIMIT_S)
        with connection:
            assert connection.recv(4096) == b""
