from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from torchweft.engine.io import session
from torchweft.engine.io.session import (
    is_unanswered,
    keep_alive,
    probe_interval_s,
    silence_s,
)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def heard_s(connection: socket.socket) -> float:
    silent_s = silence_s(connection)
    assert silent_s is not None
    return silent_s


def test_silence_is_told_from_an_answer(pair: Pair) -> None:
    ours, theirs = pair
    deadline_s = time.monotonic() + 5.0
    while heard_s(ours) < 0.05:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    theirs.sendall(b"x")
    assert ours.recv(1) == b"x"
    assert heard_s(ours) < 0.05


def test_the_kernel_answers_for_a_process_that_does_not_read(pair: Pair) -> None:
    ours, _ = pair
    deadline_s = time.monotonic() + 5.0
    while heard_s(ours) < 0.05:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    ours.sendall(b"nobody reads it")
    while heard_s(ours) >= 0.05:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_what_comes_does_not_count_while_nothing_is_answered(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``test_lost_links`` covers real networks of which one direction fails."""
    ours = pair[0]
    assert silence_s(ours) is not None
    assert not is_unanswered(ours)
    as_it_is = session._info(ours)
    monkeypatch.setattr(session, "_info", lambda _: as_it_is[:2] + b"\1" + as_it_is[3:])
    assert silence_s(ours) is None
    assert is_unanswered(ours)


@pytest.mark.parametrize(
    ("detection_s", "interval_s"), [(0.1, 1), (4.9, 1), (5.0, 1), (15.0, 3), (100.0, 20)]
)
def test_an_idle_connection_is_probed_five_times_before_it_is_silent(
    pair: Pair, detection_s: float, interval_s: int
) -> None:
    assert probe_interval_s(detection_s) == interval_s
    ours = pair[0]
    keep_alive(ours, detection_s)
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        assert ours.getsockopt(socket.IPPROTO_TCP, option) == interval_s
    # The kernel's own limits expire after this side's.
    probes = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
    assert probes * interval_s >= detection_s
    limit_ms = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert limit_ms == int(2000 * detection_s)
