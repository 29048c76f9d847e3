"""Groups that never become complete: the present workers learn in time which ranks are missing."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import pytest

from tests import far_workers as far
from tests.contract.processes.functions import stop, wait_until
from tests.contract.processes.hosts import Host, network
from tests.far_workers import states_of_others, try_to_join
from tests.open_workers import OpenWorkers, WarmProcess
from torchweft import secret
from torchweft.errors import RendezvousTimeout

TIMEOUT_S = 1.0
LATE_S = 2.0
"""How long an answer of the store may take after the time is up."""
SLACK_S = 0.5
"""Allowance for joining itself, which usually takes a few milliseconds."""


def waited_for_core_s(pid: int) -> float:
    """Returns how long the threads of a process were ready to run but had no core."""
    waited_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The thread has ended.
            waited_ns += int(path.read_text().split()[1])
    return waited_ns / 1e9


class Joiners:
    """Processes that try to join groups."""

    def __init__(self, process: WarmProcess, folder: Path) -> None:
        self._warm = OpenWorkers(process, far.__name__)
        self._names: list[str] = []
        self.pids: dict[str, int] = {}
        self.environment = {"WEFT_SECRET_FILE": str(folder / "secret")}
        secret.write_new(folder / "secret")

    def begin(
        self, rank: int, size: int | None, method: str, host: Host | None = None, **options: float
    ) -> str:
        name = f"joiner{len(self._names)}"
        self._names.append(name)
        namespace, listen = (host.namespace, host.address) if host else ("", "127.0.0.1")
        told = {"init_method": method, "init_timeout": TIMEOUT_S, "listen": listen, **options}
        self.pids[name] = self._warm.do(name, os.getpid)
        self._warm.begin(name, try_to_join, namespace, self.environment, rank, size, told)
        return name

    def begin_again(self, name: str, rank: int, size: int, method: str) -> None:
        """Has a process that could not join try it again, for long."""
        told = {"init_method": method, "init_timeout": 60, "listen": "127.0.0.1"}
        self._warm.begin(name, try_to_join, "", self.environment, rank, size, told)

    def result(self, name: str) -> tuple[float, RendezvousTimeout | None]:
        elapsed_s, error = self._warm.result(name)
        print(f"after {elapsed_s:.3f} s: {error}")
        return elapsed_s, error

    def slack_s(self) -> float:
        """Returns how much longer a joiner may take on a busy machine."""
        return SLACK_S + sum(waited_for_core_s(self.pids[name]) for name in self._names)

    def others(self, name: str) -> dict[str, str]:
        states: dict[str, str] = self._warm.do(name, states_of_others)
        return states

    def end(self) -> None:
        while self._names:
            self._warm.kill(self._names.pop())

    def close(self) -> None:
        self._warm.close()


@pytest.fixture(scope="module")
def warm_joiners(
    warm_process: WarmProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Joiners]:
    with contextlib.closing(Joiners(warm_process, tmp_path_factory.mktemp("joiners"))) as made:
        yield made


@pytest.fixture
def joiners(warm_joiners: Joiners) -> Iterator[Joiners]:
    yield warm_joiners
    warm_joiners.end()


def method_of(kind: str, folder: Path) -> str:
    if kind == "file":
        return f"file://{folder}/store"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(
    ("kind", "ranks"), [("file", (1,)), ("file", (0, 2)), ("tcp", (0,)), ("tcp", (1, 2))]
)
def test_who_is_missing_is_named_in_time(
    joiners: Joiners, tmp_path: Path, kind: str, ranks: tuple[int, ...]
) -> None:
    method, size = method_of(kind, tmp_path), max(2, len(ranks) + 1)
    (missing,) = set(range(size)) - set(ranks)
    names = [joiners.begin(rank, size, method) for rank in ranks]
    for name in names:
        elapsed_s, error = joiners.result(name)
        assert isinstance(error, RendezvousTimeout)
        assert error.missing == (missing,)
        assert f"rank {missing}" in str(error)
        assert TIMEOUT_S * 0.9 < elapsed_s < TIMEOUT_S + joiners.slack_s()


@pytest.mark.parametrize(("kind", "early"), [("file", 0), ("file", 1), ("tcp", 0)])
def test_a_later_attempt_meets_a_worker_that_comes_late(
    joiners: Joiners, tmp_path: Path, kind: str, early: int
) -> None:
    method = method_of(kind, tmp_path)
    name = joiners.begin(early, 2, method)
    _, error = joiners.result(name)
    assert isinstance(error, RendezvousTimeout)
    joiners.begin_again(name, early, 2, method)
    late = joiners.begin(1 - early, 2, method, init_timeout=60)
    assert joiners.result(name)[1] is None
    assert joiners.result(late)[1] is None


def test_an_open_group_whose_host_is_missing(joiners: Joiners, tmp_path: Path) -> None:
    elapsed_s, error = joiners.result(joiners.begin(1, None, method_of("tcp", tmp_path)))
    assert isinstance(error, RendezvousTimeout)
    assert error.missing == (0,)
    assert elapsed_s < TIMEOUT_S + joiners.slack_s()


@pytest.mark.parametrize("size", [3, None])
def test_the_host_of_the_store_is_stopped(
    joiners: Joiners, tmp_path: Path, size: int | None
) -> None:
    method = method_of("tcp", tmp_path)
    address = urlsplit(method)
    assert address.hostname is not None
    first = joiners.begin(0, 3, method, init_timeout=60)
    with contextlib.ExitStack() as stack:
        wait_until(lambda: is_heard(stack, address), lambda: "nobody hosts the store")
    stop(joiners.pids[first])
    elapsed_s, error = joiners.result(joiners.begin(1, size, method))
    assert isinstance(error, RendezvousTimeout)
    assert f"at {address.netloc} does not answer" in str(error)
    assert elapsed_s < TIMEOUT_S + LATE_S + joiners.slack_s()


def is_heard(stack: contextlib.ExitStack, address: SplitResult) -> bool:
    try:
        stack.enter_context(socket.create_connection((address.hostname, address.port)))
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with network() as made:
        yield made


def test_hosts_that_do_not_hear_each_other(joiners: Joiners, hosts: list[Host]) -> None:
    hosts[0].mute(hosts[1])
    method = f"tcp://{hosts[0].address}:{far.STORE_PORT}"
    names = [joiners.begin(rank, 2, method, host) for rank, host in enumerate(hosts)]
    for rank, name in enumerate(names):
        elapsed_s, error = joiners.result(name)
        assert isinstance(error, RendezvousTimeout)
        assert error.missing == (1 - rank,)
        assert elapsed_s < TIMEOUT_S + joiners.slack_s()


def test_a_newcomer_does_not_wait_for_each_member_that_is_gone(
    joiners: Joiners, hosts: list[Host], tmp_path: Path
) -> None:
    method = f"file://{tmp_path}/store"
    for rank in (0, 1, 2):
        assert (
            joiners.result(joiners.begin(rank, None, method, hosts[0], init_timeout=20))[1] is None
        )
    near = joiners.begin(3, None, method, hosts[1], init_timeout=20)
    assert joiners.result(near)[1] is None
    hosts[0].pull()
    start_s = time.monotonic()
    newcomer = joiners.begin(4, None, method, hosts[1])
    elapsed_s, error = joiners.result(newcomer)
    assert error is None
    assert elapsed_s <= time.monotonic() - start_s < TIMEOUT_S + SLACK_S + joiners.slack_s()
    lost = dict.fromkeys(("worker0", "worker1", "worker2"), "LOST")
    assert joiners.others(newcomer) == {**lost, "worker3": "UNUSED"}
