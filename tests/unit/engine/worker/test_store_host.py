from __future__ import annotations

import socket
import threading
import time

import pytest

from torchweft import knobs
from torchweft.engine.worker.rendezvous import await_host

LIMIT_S = 10.0


@pytest.fixture
def port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        number: int = reserved.getsockname()[1]
        return number


def take_time(init_method: str, rank: int, timeout_s: float) -> float:
    start_s = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        await_host(init_method, rank, timeout_s)
    return time.monotonic() - start_s


def test_the_wait_ends_in_time(port: int) -> None:
    assert 0.2 < take_time(f"tcp://127.0.0.1:{port}", 1, 0.3) < 0.8


def test_a_host_that_comes_late_is_found(port: int) -> None:
    waiting = threading.Thread(target=await_host, args=(f"tcp://127.0.0.1:{port}", 1, LIMIT_S))
    waiting.start()
    with socket.create_server(("127.0.0.1", port)):
        waiting.join(LIMIT_S)
        assert not waiting.is_alive()


def test_the_environment_names_the_host(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    take_time("env://", 1, 0.1)


@pytest.mark.parametrize(
    ("init_method", "rank"), [("tcp://127.0.0.1:{}", 0), ("file:///x", 1), ("tcp://nowhere", 1)]
)
def test_there_may_be_nobody_to_wait_for(init_method: str, rank: int, port: int) -> None:
    await_host(init_method.format(port), rank, LIMIT_S)


def test_rank_0_waits_for_a_launcher_that_hosts_the_store(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    take_time(f"tcp://127.0.0.1:{port}", 0, 0.1)


def test_a_long_wait_is_told_of(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with knobs.WAIT_NOTICE_S.override(0.1):
        take_time(f"tcp://127.0.0.1:{port}", 1, 0.3)
    (message,) = caplog.messages
    place = f"the store at 127.0.0.1:{port}"
    assert message == f"rank 1 has waited 0 s in init_rpc for rank 0 to open {place}"
