"""Strangers connect: each gets the answer in the table, and the members work on undisturbed."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.certificates import Authority
from tests.open_workers import OpenWorkers, WarmProcess
from tests.processes import strange_members, strangers_table
from tests.processes.bad_members import MEMBERS
from tests.processes.stranger_groups import (
    FEW_THREADS,
    MEMORY_BYTES,
    OTHER,
    SLOWEST_S,
    STRANGER_LIMIT,
    VICTIM,
    Group,
)
from tests.processes.strangers import GONE, STRANGERS, Row, Victim, between, in_words, tls_rows
from tests.processes.strangers_table import PAGE
from torchweft.engine.io import addresses

pytestmark = pytest.mark.keeps("threads", "descriptors", "processes")
FLOOD = 400
OPEN_AT_A_TIME = 150


@pytest.fixture(scope="module")
def warm(warm_process: WarmProcess) -> Iterator[OpenWorkers]:
    started = OpenWorkers(warm_process, "tests.processes.strange_members")
    yield started
    started.close()


@pytest.fixture(scope="module")
def group(warm: OpenWorkers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    made = Group(warm, tmp_path_factory.mktemp("plain"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def victim(group: Group) -> Victim:
    return group.victim()


@pytest.mark.parametrize("row", STRANGERS, ids=lambda row: row.title)
def test_a_stranger(group: Group, victim: Victim, row: Row) -> None:
    got = group.suffer(row, victim)
    assert (got.said, got.hung_up) == (row.said, row.hung_up)


def test_who_dials_a_stranger_in_between_is_told(group: Group, victim: Victim) -> None:
    between(OTHER, lambda _: strange_members.GHOST)(victim)
    assert victim.told_dialler == f"Refused: turned away: {GONE}"
    between(VICTIM, lambda _: victim.id)(victim)
    assert victim.told_dialler == "ConnectionError: end of file during the greeting"


class Flood:
    """Opens connections continuously, sends nothing on them, and keeps many of them open."""

    def __init__(self, victim: Victim) -> None:
        self._victim = victim
        self._kept: deque[socket.socket] = deque()
        self._is_ending = False
        self.count = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_ending:
            try:
                self._kept.append(addresses.dial(self._victim.address, 5.0))
            except OSError:
                continue
            self.count += 1
            if len(self._kept) > OPEN_AT_A_TIME:
                self._kept.popleft().close()

    def end(self) -> None:
        self._is_ending = True
        self._thread.join(10.0)
        for connection in self._kept:
            connection.close()


def survive_flood(group: Group) -> None:
    victim, before = group.victim(), group.state()
    flood = Flood(victim)
    try:
        for rank in range(2, 6):
            name = f"newcomer{rank}"
            group.join(name, rank)
            assert group.do(name, strange_members.call_once, VICTIM) == VICTIM
            assert group.do(VICTIM, strange_members.call_once, name) == name
            threads = group.do(VICTIM, strange_members.threads)
            assert threads <= before.threads + STRANGER_LIMIT + FEW_THREADS
            assert group.do(OTHER, strange_members.calls_go_on, VICTIM) < SLOWEST_S
        while flood.count < FLOOD:
            group.do(OTHER, strange_members.calls_go_on, VICTIM)
    finally:
        flood.end()
    after = group.state()
    # Beside the open connections, there may be as many that their threads have yet to close.
    assert after.descriptors < before.descriptors + 2 * STRANGER_LIMIT + FEW_THREADS
    assert after.largest_bytes < before.largest_bytes + MEMORY_BYTES


def test_members_join_and_call_in_a_flood_of_strangers(group: Group) -> None:
    survive_flood(group)


def test_of_too_many_strangers_the_oldest_goes(
    warm: OpenWorkers, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # With this time limit, no connection is closed for its age.
    patient = Group(
        warm, tmp_path_factory.mktemp("patient"), settings={"WEFT_CONNECT_TIMEOUT_S": "600"}
    )
    address = patient.victim().address
    connections = [addresses.dial(address, 5.0) for _ in range(2 * STRANGER_LIMIT)]
    try:
        connections[0].settimeout(20.0)
        while connections[0].recv(4096):  # It may have got its challenge before.
            pass
    finally:
        for connection in connections:
            connection.close()
        patient.close()


# Workers with TLS


@pytest.fixture(scope="module")
def secure_group(warm: OpenWorkers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    folder = tmp_path_factory.mktemp("tls")
    made = Group(warm, folder, Authority(folder).options())
    yield made
    made.close()


@pytest.fixture(scope="module")
def certificate_of_another(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Authority(tmp_path_factory.mktemp("other")).certificate()


@pytest.mark.parametrize("row", range(len(tls_rows(""))), ids=lambda n: tls_rows("")[n].title)
def test_a_stranger_and_tls(secure_group: Group, certificate_of_another: str, row: int) -> None:
    tried = tls_rows(certificate_of_another)[row]
    got = secure_group.suffer(tried, secure_group.victim())
    assert (got.said, got.hung_up) == (tried.said, tried.hung_up)


def test_members_join_and_call_in_a_flood_of_strangers_with_tls(secure_group: Group) -> None:
    survive_flood(secure_group)


# Members that dial a stranger


def serve_once(listener: socket.socket, context: ssl.SSLContext | None) -> None:
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        if context is None:
            connection.sendall(b"x" * 54)
            connection.recv(1)
        else:
            context.wrap_socket(connection, server_side=True).recv(1)


@pytest.mark.parametrize(
    ("listens", "told"),
    [
        ("plain", "TlsError: .*it does not speak TLS"),
        ("another authority", "TlsError: .*this side does not trust its certificate"),
        ("said to be plain", "Refused: .*it is a worker without TLS, this one is with"),
    ],
)
def test_with_tls_nobody_in_between_is_talked_to(
    secure_group: Group, certificate_of_another: str, listens: str, told: str
) -> None:
    victim, context = secure_group.victim(), None
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        if listens == "said to be plain":
            result = victim.dial_at(OTHER, f"tcp:127.0.0.1:{port}", 0)()
        else:
            if listens == "another authority":
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(certificate_of_another)
            listener.settimeout(10.0)
            served = pool.submit(serve_once, listener, context)
            result = victim.dial_at(OTHER, f"tls:127.0.0.1:{port}", 0)()
            served.result(10.0)
    assert re.match(told, result), result


def test_the_page_has_all_of_it() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [*STRANGERS, *tls_rows("")]
    for row in rows:
        begin = f"| {row.title} | {in_words(row.said)}"
        (line,) = [each for each in lines if each.startswith(begin) and row.hung_up in each] or [""]
        assert line, f"{begin}: run python -m {strangers_table.__name__}"
        lines.remove(line)
    assert lines == [
        *["| what it tries | what it gets |"] * 3,
        *[f"| {row.title} | {row.result} |" for row in MEMBERS],
    ]
