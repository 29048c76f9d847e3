from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore, PrefixStore

from torchweft import knobs
from torchweft.engine.protocol import joining
from torchweft.engine.protocol.registration import Directory, Registration
from torchweft.engine.worker import rendezvous
from torchweft.engine.worker.rendezvous import SignedStore, carry_out, join, open_store, perform
from torchweft.errors import (
    RendezvousError,
    RendezvousTimeout,
)

LIMIT_S = 20.0


def rounds(*over: str) -> deque[str]:
    """Returns the rounds that a process has been in."""
    return deque(over, maxlen=64)


class Joining(threading.Thread):
    """Joins a group in a thread of its own."""

    def __init__(
        self, store: Any, rank: int, world_size: int, timeout_s: float = LIMIT_S, name: str = ""
    ) -> None:
        super().__init__(name=f"joining-{rank}")
        self._registration = Registration(name or f"worker{rank}", rank, ("unix:@x",))
        if not isinstance(store, SignedStore):
            store = SignedStore(store, None)
        self._arguments = (store, self._registration, world_size, timeout_s, rounds())
        self.outcome: Directory | BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = join(*self._arguments)
        except BaseException as error:
            self.outcome = error


def outcomes(*threads: Joining) -> list[Directory | BaseException | None]:
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return [thread.outcome for thread in threads]


def test_without_rank_0_the_others_find_out_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "GRACE_S", 0.01)
    store = HashStore()
    (outcome,) = outcomes(Joining(store, 1, 3, 0.01))
    assert isinstance(outcome, RendezvousTimeout)
    assert outcome.missing == (0, 2)
    assert "missing: rank 0, rank 2" in str(outcome)


@pytest.mark.parametrize(
    ("rank", "hint", "missing"),
    [(0, "rank 0 hosts the store: MASTER_ADDR", ()), (1, "is rank 0 running", (0,))],
)
def test_a_store_that_cannot_be_opened_is_explained(
    monkeypatch: pytest.MonkeyPatch, rank: int, hint: str, missing: tuple[int, ...]
) -> None:
    def refuses(url: str, timeout: timedelta) -> None:
        # PyTorch's store must not wait for all workers: it would not name the missing ones.
        assert url == f"tcp://127.0.0.1:1?rank={rank}&world_size=-1"
        raise RuntimeError("refused\nwith a long trace")

    monkeypatch.setattr(rendezvous, "rendezvous", refuses)
    monkeypatch.setattr(rendezvous, "await_host", lambda *arguments: None)
    with pytest.raises(RendezvousTimeout, match=f"refused; {hint}") as caught:
        open_store("tcp://127.0.0.1:1", rank, 2, 0.1)
    assert caught.value.missing == missing


# A TCP store that fails to open leaves a pipe of its event loop behind.
@pytest.mark.keeps("descriptors")
def test_a_port_in_use_is_named_with_the_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RendezvousError) as caught:
            open_store(f"tcp://127.0.0.1:{port}", 0, 2, LIMIT_S)
    assert not isinstance(caught.value, RendezvousTimeout)
    assert f"at 127.0.0.1:{port}: another program" in str(caught.value)
    assert "MASTER_PORT" in str(caught.value)


def test_something_that_takes_connections_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        began_s = time.monotonic()
        with pytest.raises(RendezvousTimeout, match=f"at 127.0.0.1:{port} does not") as caught:
            open_store(f"tcp://127.0.0.1:{port}", 1, 2, 0.2)
        assert time.monotonic() - began_s < 6.0
        assert "MASTER_PORT" in str(caught.value)
    # The operation's thread ends with the connection.
    for thread in threading.enumerate():
        if thread.name == "weft-store":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_an_interrupted_rank_0_tells_the_others() -> None:
    store = HashStore()

    def interrupted(request: joining.Request) -> Any:
        if isinstance(request, joining.Wait):
            raise KeyboardInterrupt
        return perform(SignedStore(store, None), request)

    first, second = (Registration(f"worker{rank}", rank, ("unix:@x",)) for rank in range(2))
    steps = joining.join_closed(first, 2, "0" * 32, LIMIT_S, time.monotonic, rounds())
    with pytest.raises(KeyboardInterrupt):
        carry_out(steps, interrupted)
    with pytest.raises(RendezvousError, match="rank 0 was interrupted by KeyboardInterrupt"):
        join(SignedStore(store, None), second, 2, 0.1, rounds())


def test_rank_0_waits_until_others_know_why_there_is_no_group() -> None:
    read: list[str] = []

    class SlowlyRead(PrefixStore):
        """A store whose reader takes a while."""

        def get(self, key: str) -> bytes:
            if key.startswith("directory/"):
                time.sleep(0.2)
                read.append("directory")
            return super().get(key)

    shared = HashStore()
    other = Joining(SlowlyRead("x", shared), 1, 3, 0.3)
    first = Joining(PrefixStore("x", shared), 0, 3, 0.3)
    outcomes(first)
    assert read == ["directory"]
    for outcome in outcomes(first, other):
        assert isinstance(outcome, RendezvousTimeout)
        assert outcome.missing == (2,)


class Gone(PrefixStore):
    """A store whose host ends after ``calls`` operations: later ones fail."""

    def __init__(self, calls: int) -> None:
        super().__init__("x", HashStore())
        self._left = calls

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise DistNetworkError("connection reset by peer\nwith a long trace")

    def set(self, key: str, value: str) -> None:
        self._count()
        super().set(key, value)

    def check(self, keys: list[str]) -> bool:
        self._count()
        return super().check(keys)


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_store_that_ends_is_told_from_workers_that_are_missing(calls: int) -> None:
    (outcome,) = outcomes(Joining(Gone(calls), 1, 4, 0.1))
    assert isinstance(outcome, RendezvousError)
    assert "rendezvous store does not answer any more" in str(outcome)
    assert "rank 0, ended?" in str(outcome)
    assert "trace" not in str(outcome)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_long_wait_names_who_is_missing(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    with knobs.WAIT_NOTICE_S.override(0.1):
        first = Joining(store, rank, 3)
        wait_for(lambda: bool(caplog.messages))
    others = [Joining(store, other, 3) for other in {0, 1, 2} - {rank}]
    assert all(isinstance(outcome, Directory) for outcome in outcomes(first, *others))
    missing = ", ".join(f"rank {other}" for other in sorted({0, 1, 2} - {rank}))
    (message,) = caplog.messages
    assert message == f"worker 'worker{rank}' has waited 0 s in init_rpc for {missing} of 3 to join"


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# Rounds: the store may outlive the workers, and a process may join several groups


def test_two_workers_of_one_rank_are_told_at_once() -> None:
    store = HashStore()
    first = Joining(store, 0, 3)
    store.wait(["round"], timedelta(seconds=LIMIT_S))
    token = store.get("round").decode()
    one = Joining(store, 1, 3, name="one")
    store.wait([f"worker/1/{token}"], timedelta(seconds=LIMIT_S))
    wait_for(lambda: b'"one"' in store.get(f"worker/1/{token}"))
    other = Joining(store, 1, 3, name="other")
    wait_for(lambda: b'"other"' in store.get(f"worker/1/{token}"))
    got = outcomes(first, one, other, Joining(store, 2, 3))
    assert isinstance(got[0], Directory)
    (wrong,) = (outcome for outcome in got[1:3] if not isinstance(outcome, Directory))
    assert isinstance(wrong, RendezvousError)
    assert "two workers have this rank" in str(wrong)
