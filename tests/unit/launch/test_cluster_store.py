from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from torchweft.errors import LaunchError
from torchweft.launch.cluster_store import WATCH_S, ClusterStore


class LateStore(dist.Store):
    """Has every key after a number of waits, none of which takes time."""

    def __init__(self, waits: int) -> None:
        super().__init__()
        self.waits = waits
        self.waited_s = 0.0

    def wait(self, keys: list[str], timeout: timedelta = timedelta.max) -> None:
        self.waits -= 1
        if self.waits > 0:
            self.waited_s += timeout.total_seconds()
            raise RuntimeError("timeout")


def test_waits_until_the_key_is_there() -> None:
    store = LateStore(waits=5)
    ClusterStore(store, lambda: None).wait(["key"], timedelta(seconds=10))
    assert store.waited_s == pytest.approx(4 * WATCH_S)


def test_waits_no_longer_than_asked_for() -> None:
    store = LateStore(waits=1000)
    with pytest.raises(RuntimeError, match="timeout"):
        ClusterStore(store, lambda: None).wait(["key"], timedelta(seconds=1))
    assert store.waited_s == pytest.approx(1, abs=0.01)


def test_a_worker_that_ended_ends_the_wait() -> None:
    store = LateStore(waits=1000)
    failures = [None, None, LaunchError("worker 'a' ended")]
    watching = ClusterStore(store, lambda: failures.pop(0))
    watched = dist.PrefixStore("weft/0", watching)
    with pytest.raises(LaunchError, match="'a'"):
        watched.wait(["key"], timedelta(seconds=60))
    assert store.waited_s == pytest.approx(2 * WATCH_S)
