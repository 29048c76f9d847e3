"""Two workers connected only by a network, each in its own network namespace."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import far_workers as far
from tests.processes.far_workers import far_workers
from tests.processes.hosts import Host, enter, network
from tests.processes.open_workers import OpenWorkers, WarmProcess
from torchweft import rpc, secret
from torchweft.agent.current import current
from torchweft.channel.stripes import Stripes
from torchweft.compat import rpc as compat_rpc
from torchweft.errors import ConfigurationError, RendezvousError, RendezvousTimeout

SIZES = [1, 1 << 16, (1 << 19) + 1, 5 << 20, (64 << 20) + 3]


def call_all() -> dict[str, Any]:
    """Sends tensors of all sizes there and back; returns how they travelled."""
    peer = current().peers[1]
    rpc.rpc_sync(1, far.double, args=(torch.ones(1),))
    # Large tensors travel behind their messages until the peer has said what it can receive.
    while peer.ways.first_for(SIZES[-1]) != "striped":
        rpc.rpc_sync(1, far.double, args=(torch.ones(1),))
    wrong = []
    for size_bytes in SIZES:
        sent = (torch.arange(size_bytes, dtype=torch.int32) % 100).to(torch.uint8)
        if not torch.equal(rpc.rpc_sync(1, far.double, args=(sent,)), sent * 2):
            wrong.append(size_bytes)
    assert peer.link is not None
    data = current().channels.of(Stripes)._of(peer)
    assert data.sending is not None
    return {
        "wrong": wrong,
        "way": peer.ways.first_for(SIZES[-1]),
        "family": peer.link._socket.family.name,
        "data families": [sending._socket.family.name for sending in data.sending.connections],
        "received": data.arrivals.bytes_received,
    }


def test_tensors_cross_a_network(warm: OpenWorkers, tmp_path: Path) -> None:
    with network() as hosts, far_workers(warm, hosts, tmp_path) as workers:
        found = workers.do("worker0", call_all)
        for name in workers.names:
            workers.begin(name, far.leave)
        for name in workers.names:
            workers.result(name)
    assert found["wrong"] == []
    assert found["family"] == "AF_INET"
    assert found["way"] == "striped"
    assert found["data families"] == ["AF_INET"] * len(found["data families"])
    assert found["received"] == sum(size for size in SIZES if size >= 1 << 19)


# What an unchanged program meets if it sets only the address of rank 0


class Pair:
    """Two workers, each on a host of its own."""

    NAMES = ("worker0", "worker1")

    def __init__(self, warm: OpenWorkers, hosts: list[Host]) -> None:
        self.warm = warm
        self._hosts = hosts

    def join(
        self, settings: dict[str, str], size: int | None = 2, *, is_compat: bool = False
    ) -> list[tuple[float, Exception | None]]:
        """Has both join; returns how many seconds each took, and its error."""
        outcomes = []
        for rank, host in enumerate(self._hosts):
            meeting = {"MASTER_ADDR": self._hosts[0].address, "MASTER_PORT": str(far.STORE_PORT)}
            arguments = (host.namespace, {**settings, **meeting}, rank, size)
            if is_compat:
                self.warm.begin(self.NAMES[rank], join_as_with_torch, *arguments)
            else:
                told = {"init_timeout": far.LIMIT_S}
                self.warm.begin(self.NAMES[rank], far.try_to_join, *arguments, told)
            if size is None:  # Rank 0 must be present first.
                outcomes.append(self.warm.result(self.NAMES[rank]))
        return outcomes or [self.warm.result(name) for name in self.NAMES]

    def call(self, rank: int) -> object:
        to = self.NAMES[1 - rank]
        return self.warm.do(self.NAMES[rank], far.call, to, os.getpid) == self.warm.do(
            to, os.getpid
        )

    def end(self) -> None:
        for name in self.NAMES:
            self.warm.kill(name)


def join_as_with_torch(
    namespace: str, environment: dict[str, str], rank: int, size: int | None
) -> tuple[float, Exception | None]:
    enter(namespace)
    os.environ.update(environment)
    began_s = time.monotonic()
    problem: Exception | None = None
    try:
        compat_rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    except RuntimeError as error:
        problem = error
    return time.monotonic() - began_s, problem


@pytest.fixture(scope="module")
def warm(warm_process: WarmProcess) -> Iterator[OpenWorkers]:
    with contextlib.closing(
        OpenWorkers(warm_process, far.__name__, compat_rpc.__name__)
    ) as workers:
        yield workers


@pytest.fixture
def pair(warm: OpenWorkers) -> Iterator[Pair]:
    with network() as hosts:
        made = Pair(warm, hosts)
        yield made
        made.end()


@pytest.mark.parametrize("is_compat", [False, True])
def test_a_group_over_hosts_without_a_secret_says_how_to_make_it_work(
    pair: Pair, is_compat: bool
) -> None:
    for took_s, error in pair.join({}, is_compat=is_compat):
        assert isinstance(error, RendezvousError)
        assert not isinstance(error, RendezvousTimeout)
        assert "torchweft secret new weft.secret" in str(error)
        assert "export WEFT_SECRET_FILE=weft.secret" in str(error)
        assert took_s < far.LIMIT_S / 2


def test_a_newcomer_on_another_host_is_told_so_too(pair: Pair) -> None:
    (_, first), (_, second) = pair.join({}, None)
    assert first is None
    assert isinstance(second, RendezvousError)
    assert "export WEFT_SECRET_FILE=weft.secret" in str(second)


@pytest.mark.parametrize("is_compat", [False, True])
@pytest.mark.parametrize("listen", ["", "0.0.0.0"])
def test_a_secret_is_all_that_workers_of_two_hosts_need(
    pair: Pair, tmp_path: Path, listen: str, is_compat: bool
) -> None:
    secret.write_new(tmp_path / "secret")
    settings = {"WEFT_SECRET_FILE": str(tmp_path / "secret"), "WEFT_LISTEN": listen}
    assert [error for _, error in pair.join(settings, is_compat=is_compat)] == [None, None]
    assert pair.call(0)
    assert pair.call(1)


def test_who_has_a_secret_and_listens_on_loopback_is_named(pair: Pair, tmp_path: Path) -> None:
    secret.write_new(tmp_path / "secret")
    settings = {"WEFT_SECRET_FILE": str(tmp_path / "secret"), "WEFT_LISTEN": "127.0.0.1"}
    for _, error in pair.join(settings):
        assert isinstance(error, RendezvousError)
        assert "'worker0' (rank 0" in str(error)
        assert "Set WEFT_LISTEN" in str(error)


@pytest.mark.parametrize("is_compat", [False, True])
def test_an_address_of_the_network_without_a_secret(warm: OpenWorkers, is_compat: bool) -> None:
    said = warm.do("alone", refused_address, is_compat)
    warm.kill("alone")
    assert "there is no secret" in said
    assert "torchweft secret new" in said


def refused_address(is_compat: bool) -> str:
    os.environ.update(WEFT_LISTEN="198.18.77.1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    init = compat_rpc.init_rpc if is_compat else rpc.init_rpc
    try:
        init("worker0", rank=0, world_size=2)
    except ConfigurationError as error:
        return str(error)
    return "nothing went wrong"
