from __future__ import annotations

import gc
import select
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore

from torchweft.engine.worker import rendezvous
from torchweft.engine.worker.rendezvous import LauncherStore, open_launcher_store
from torchweft.launch.meeting import StoreServer


class Launcher:
    """Serves a store in a thread, as a launcher does in its loop."""

    def __init__(self) -> None:
        self._server = StoreServer()
        self.name = self._server.init_method.removeprefix("unix://")
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="launcher")
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_over:
            if select.select([self._server], [], [], 0.02)[0]:
                self._server.serve()

    def end(self) -> None:
        self._is_over = True
        self._thread.join()
        self._server.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.end()
    rendezvous._opened.clear()


def test_pytorch_reaches_every_operation(launcher: Launcher) -> None:
    store = PrefixStore("weft/0", open_launcher_store(launcher.name, 5.0))
    gc.collect()  # the test holds no reference to the store's Python half
    assert not store.check(["key"])
    store.set("key", "värde \0")
    assert store.get("key") == "värde \0".encode()
    assert store.add("number", 2) == 2
    assert store.add("number", 3) == 5
    assert store.compare_set("kind", "", "open") == b"open"
    assert store.compare_set("kind", "", "closed") == b"open"
    store.wait(["key", "kind"], timedelta(seconds=5))
    assert store.check(["key", "kind"])
    assert LauncherStore(launcher.name, 5.0).get("weft/0/number") == b"5"


def test_a_wait_ends_when_another_sets_the_key(launcher: Launcher) -> None:
    store = LauncherStore(launcher.name, 5.0)
    setter = threading.Timer(0.05, lambda: LauncherStore(launcher.name, 5.0).set("late", "v"))
    setter.start()
    assert store.get("late") == b"v"
    setter.join()


def test_a_wait_in_vain_is_bounded(launcher: Launcher) -> None:
    store = PrefixStore("weft/0", open_launcher_store(launcher.name, 5.0))
    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"weft/0/never did not come within 0\.1 s"):
        store.wait(["never"], timedelta(seconds=0.1))
    assert 0.1 <= time.monotonic() - start_s < 2.0


def test_a_refusal_says_what_was_wrong(launcher: Launcher) -> None:
    store = LauncherStore(launcher.name, 5.0)
    store.set("text", "no number")
    with pytest.raises(RuntimeError, match=r"refuses add: ValueError"):
        store.add("text", 1)


def test_without_a_launcher_that_is_said_at_once() -> None:
    launcher = Launcher()
    launcher.end()
    with pytest.raises(RuntimeError, match=r"does not answer.*has 'torchweft run' ended"):
        LauncherStore(launcher.name, 60.0).add("key", 1)


def test_a_launcher_that_is_stuck_is_not_waited_for_without_a_limit() -> None:
    server = StoreServer()
    try:
        store = LauncherStore(server.init_method.removeprefix("unix://"), 0.05)
        with pytest.raises(RuntimeError, match="does not answer: timed out"):
            store.add("key", 1)
    finally:
        server.close()
