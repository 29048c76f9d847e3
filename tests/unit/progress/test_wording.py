"""Tests the exact texts."""

from __future__ import annotations

import io

from torchweft.progress import Display, Nouns
from torchweft.progress.work import Work

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
