from __future__ import annotations

import socket
import time

import pytest

from torchweft.engine.worker.rendezvous import await_host


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


def test_rank_0_waits_for_a_launcher_that_hosts_the_store(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    take_time(f"tcp://127.0.0.1:{port}", 0, 0.1)
