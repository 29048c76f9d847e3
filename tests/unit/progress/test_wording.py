"""Tests the exact texts."""

from __future__ import annotations

import io

import pytest

from torchweft.progress import Display, Nouns, WorkerShare
from torchweft.progress.work import Loss, Work

WORKERS = ["worker0", "worker1", "worker2"]


class Maps(Display):
    nouns = Nouns("map", "part")

    def __init__(self, total: int | None = None, label: str = "", now: float = 0.0) -> None:
        self.told = io.StringIO()
        super().__init__(total, label, out=self.told)
        self.now = now
        self.work = Work(total, lambda: self.now)

    def texts(self) -> list[str]:
        return ["  ".join(filter(None, (each.title, each.done, each.note))) for each in self.rows()]

    def lines(self) -> list[str]:
        """Returns the lines that are told now."""
        self.told.truncate(0)
        self.told.seek(0)
        self._tell_news()
        return self.told.getvalue().splitlines()


def run_map(shown: Maps, map_id: int, behind: int) -> None:
    """Ends five of eight parts, of 0.4 s each; ``behind`` further parts run for 2.1 s."""
    work = shown.work
    work.begun(map_id, "inner_loop", 8, WORKERS)
    for part in range(5):
        work.started(map_id, part, "worker0")
        work.ended(map_id, part, "worker0", 0.4)
    work.lost(map_id, "worker1", [])
    for part in range(8 - behind, 8):
        work.started(map_id, part, "worker2")
    shown.now += 2.1
    work.started(map_id, 5, "worker0")


def test_steps_a_map_and_a_straggler() -> None:
    shown = Maps(3000, "meta-step")
    for step in range(1, 13):
        shown.now = step / 1.9
        shown.step(loss=0.43125, accuracy=0.91)
    run_map(shown, 1, behind=1)
    first = "meta-step  12/3000  1.4 steps/s  0:34:55 left  loss 0.4313  accuracy 0.91"
    running = "running: worker0 1  worker1 lost  worker2 1"
    assert shown.texts() == [first, f"parts of inner_loop  5/8  {running}"]
    assert [(row.steps, row.total) for row in shown.rows()] == [(12, 3000), (5, 8)]
    assert shown.lines() == [
        "worker1 was lost",
        "worker2 is behind: part 7 of inner_loop for 2.1 s (median 0.4 s)",
    ]


def test_maps_without_steps() -> None:
    shown = Maps()
    shown.work.begun(1, "module.inner__parallelize_async_unwrapped__", 1, ["wor\x1b[2Jker\n2"])
    escaped = "parts of inner  0/1  running: wor\\x1b[2Jker\\n2 0"
    assert shown.texts() == ["map 1  0 parts done", escaped]


def test_many_workers_maps_and_stragglers_are_counted() -> None:
    shown = Maps(10)
    shown.work.begun(1, "inner_loop", 640, [f"worker{rank}" for rank in range(64)])
    for part in range(63):
        shown.work.started(1, part, f"worker{part % 42}")
    assert shown.texts()[1] == "parts of inner_loop  0/640  running: 63 on 42 of 64 workers"
    for map_id in range(2, 7):
        run_map(shown, map_id, behind=2)
    assert shown.texts()[3].endswith("and 3 maps more")
    shown.now += 10.0
    assert shown.lines()[-1].endswith(" more are lost or behind")


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ((3, 7), "worker2 was lost; parts 3, 7 run again on others"),
        ((3,), "worker2 was lost; part 3 runs again on another"),
        ((), "worker2 was lost"),
        (
            tuple(range(20)),
            "worker2 was lost; parts 0, 1, 2, 3, 4, 5, 6, 7 and 12 more run again on others",
        ),
    ],
)
def test_a_loss(parts: tuple[int, ...], line: str) -> None:
    assert Maps()._lost(Loss("worker2", parts)) == line


def test_a_summary() -> None:
    shown = Maps(12, "meta-step")
    work = shown.work
    assert shown._summary(1.0, KeyboardInterrupt) == (
        "meta-step stopped by KeyboardInterrupt: 0 of 12 steps in 1.0 s"
    )
    work.step(12)
    work.jobs_begun, work.moves, work.reruns, work.jobs_failed = 12, 12, 4, 1
    work.workers = {
        "worker0": WorkerShare(1000, 100.0),
        "worker1": WorkerShare(4, 0.6, is_lost=True),
        "worker2": WorkerShare(200, 50.0, times_behind=3),
    }
    assert shown._summary(83.2, None) == (
        "meta-step: 12 steps, 1,204 parts in 0:01:23; "
        "worker0 1,000 (0:01:40), worker1 4 (0.6 s, lost), worker2 200 (50.0 s, 3 behind); "
        "12 moved; 4 rerun; 1 map failed"
    )
    work.workers |= {f"further{rank}": WorkerShare(100, 10.0) for rank in range(61)}
    assert "; 64 workers, 1 lost; " in shown._summary(74.0, None)
