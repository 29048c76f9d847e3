"""Tests the display of maps, which is an observer."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from torchweft.mapreduce import progress
from torchweft.mapreduce.observers import tell, watching
from torchweft.progress import WorkerShare

WORKERS = ["worker0", "worker1"]


@pytest.fixture(autouse=True)
def _no_observer_stays() -> Iterator[None]:
    yield
    assert not watching


def run_map(map_id: int) -> None:
    tell("begun", map_id, "module.inner__parallelize_async_unwrapped__", 2, WORKERS)
    tell("started", map_id, 0, "worker0")
    tell("started", map_id, 1, "worker1")
    tell("ended", map_id, 0, "worker0", 0.5)
    tell("moved", map_id, 1, "worker1", "worker0")
    tell("lost", map_id, "worker1", [1])
    tell("ended", map_id, 1, "worker0", 0.5)
    tell("done", map_id, None)


def test_maps_are_shown_by_two_displays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweft.progress.display.LOOK_EVERY_S", 1e6)
    out = io.StringIO()
    with progress(out=io.StringIO()) as one, progress(label="step", out=out) as two:
        run_map(1)
        two._log()
    assert one.workers == two.workers
    assert one.workers == {"worker0": WorkerShare(2, 1.0), "worker1": WorkerShare(is_lost=True)}
    line, loss, end = out.getvalue().splitlines()
    assert line == "step: map 1 2 parts done  parts of inner 2/2"
    assert loss == "worker1 was lost; part 1 runs again on another"
    assert end.startswith("step: 1 map, 2 parts in ")
    assert end.endswith("; worker0 2 (1.0 s), worker1 0 (0.0 s, lost); 1 moved; 1 rerun")


def test_an_error_removes_the_observer() -> None:
    with pytest.raises(KeyError), progress(out=io.StringIO()):
        raise KeyError("x")
    assert not watching
