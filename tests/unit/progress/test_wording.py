"""Tests the exact texts."""

from __future__ import annotations

import pytest

from torchweft.progress.wording import (
    MOST_WARNINGS,
    Nouns,
    clock,
    counted,
    duration,
    log_line,
    pace,
    rows_of,
    short,
    summary,
    warnings_of,
)
from torchweft.progress.work import Loss, Straggler, Work, WorkerShare

MAP = Nouns("map", "part")
STRAGGLER = Straggler("worker2", 7, "inner_loop", 2.1, 0.4)
WORKERS = ["worker0", "worker1", "worker2"]


class At:
    """A clock that a test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def new_work(total: int | None = None) -> tuple[Work, At]:
    clock = At()
    return Work(total, clock), clock


def texts(label: str, work: Work, nouns: Nouns = MAP) -> list[str]:
    return [
        "  ".join(filter(None, (each.title, each.done, each.note)))
        for each in rows_of(label, nouns, work)
    ]


def late(work: Work, nouns: Nouns = MAP) -> list[str]:
    return warnings_of([*work.stragglers()], nouns)


def take_twelve_steps(work: Work, clock: At) -> None:
    for step in range(1, 13):
        clock.now = step / 1.9
        work.step(1, loss=0.43125, accuracy=0.91)


def run_map(work: Work, clock: At, map_id: int, behind: int) -> None:
    """Ends five of eight parts, of 0.4 s each; ``behind`` further parts run for 2.1 s."""
    work.begun(map_id, "inner_loop", 8, WORKERS)
    for part in range(5):
        work.started(map_id, part, "worker0")
        work.ended(map_id, part, "worker0", 0.4)
    work.lost(map_id, "worker1", [])
    for part in range(8 - behind, 8):
        work.started(map_id, part, "worker2")
    clock.now += 2.1
    work.started(map_id, 5, "worker0")


def test_steps_a_map_and_a_straggler() -> None:
    work, clock = new_work(3000)
    take_twelve_steps(work, clock)
    run_map(work, clock, 1, behind=1)
    assert texts("meta-step", work) == [
        "meta-step  12/3000  loss 0.4313  accuracy 0.91",
        "parts of inner_loop  5/8  running: worker0 1  worker1 lost  worker2 1",
    ]
    assert [(row.steps, row.total) for row in rows_of("", MAP, work)] == [(12, 3000), (5, 8)]
    assert late(work) == ["worker2 is behind: part 7 of inner_loop for 2.1 s (median 0.4 s)"]


def test_an_application_has_its_own_words() -> None:
    work, clock = new_work()
    run_map(work, clock, 1, behind=1)
    nouns = Nouns("batch", "micro-batch")
    assert texts("", work, nouns) == [
        "batch 1  5 micro-batches done",
        "micro-batches of inner_loop  5/8  running: worker0 1  worker1 lost  worker2 1",
    ]
    assert late(work, nouns)[0].startswith("worker2 is behind: micro-batch 7 of inner_loop for")


def test_text_that_would_move_the_cursor_is_escaped() -> None:
    work, _ = new_work()
    work.begun(1, "inner", 1, ["wor\x1b[2Jker\n2"])
    assert texts("", work)[1] == "parts of inner  0/1  running: wor\\x1b[2Jker\\n2 0"
    assert "\x1b" not in log_line("la\x1bbel", MAP, work)


@pytest.mark.parametrize(
    ("per_s", "left_s", "text"),
    [(None, None, ""), (1.9, 1572.0, "1.9 steps/s  26:12 left"), (1 / 4.2, None, "4.2 s a step")],
)
def test_paces(per_s: float | None, left_s: float | None, text: str) -> None:
    assert pace(per_s, left_s) == text


def test_before_the_first_step() -> None:
    work, _ = new_work(10)
    assert texts("", work) == ["step  0/10"]


def test_maps_without_steps() -> None:
    work, clock = new_work()
    run_map(work, clock, 1, behind=0)
    assert texts("", work)[0] == "map 1  5 parts done"
    assert texts("warm-up", work)[0] == "warm-up: map 1  5 parts done"


def test_many_workers_are_counted() -> None:
    work, _ = new_work(10)
    work.begun(1, "inner_loop", 640, [f"worker{rank}" for rank in range(64)])
    for part in range(63):
        work.started(1, part, f"worker{part % 42}")
    assert texts("", work)[1] == "parts of inner_loop  0/640  running: 63 on 42 of 64 workers"


def test_several_maps_and_many_stragglers() -> None:
    work, clock = new_work(10)
    for map_id in range(5):
        run_map(work, clock, map_id, behind=0)
    run_map(work, clock, 5, behind=2)
    for map_id in range(5):
        work.started(map_id, 7, "worker2")
    clock.now += 10.0
    shown = texts("", work)
    assert len(shown) == 4
    assert shown[1] == "parts of inner_loop  5/8  running: worker0 1  worker1 lost  worker2 1"
    assert shown[3] == "parts of inner_loop  5/8  and 3 maps more"
    assert late(work)[0].startswith("worker0 is behind: part 5 of inner_loop for ")
    assert late(work)[MOST_WARNINGS:] == ["and 5 more are lost or behind"]


def test_a_line_of_a_log() -> None:
    work, clock = new_work(3000)
    take_twelve_steps(work, clock)
    run_map(work, clock, 1, behind=1)
    assert log_line("meta-step", MAP, work) == (
        "meta-step 12/3000  1.4 steps/s  34:55 left  loss 0.4313  accuracy 0.91  "
        "parts of inner_loop 5/8"
    )


@pytest.mark.parametrize(
    ("news", "line"),
    [
        (STRAGGLER, "worker2 is behind: part 7 of inner_loop for 2.1 s (median 0.4 s)"),
        (Loss("worker2", (3, 7)), "worker2 was lost; parts 3, 7 run again on others"),
        (Loss("worker2", (3,)), "worker2 was lost; part 3 runs again on another"),
        (Loss("worker2", ()), "worker2 was lost"),
        (
            Loss("worker2", tuple(range(20))),
            "worker2 was lost; parts 0, 1, 2, 3, 4, 5, 6, 7 and 12 more run again on others",
        ),
        (Loss("wor\x1b[2Jker\n2", ()), r"wor\x1b[2Jker\n2 was lost"),
    ],
)
def test_news(news: Loss | Straggler, line: str) -> None:
    assert warnings_of([news], MAP) == [line]


def test_a_summary() -> None:
    work, clock = new_work(12)
    clock.now = 60.0
    work.step(12)
    work.jobs_begun, work.moves, work.reruns, work.jobs_failed = 12, 12, 4, 1
    work.workers = {
        "worker0": WorkerShare(1000, 100.0),
        "worker1": WorkerShare(4, 0.6, is_lost=True),
        "worker2": WorkerShare(200, 50.0, times_behind=3),
    }
    assert summary("meta-step", MAP, work, 83.2, None) == (
        "meta-step: 12 steps, 1,204 parts in 1:23; "
        "worker0 1,000 (1:40), worker1 4 (0.6 s, lost), worker2 200 (50.0 s, 3 behind); "
        "12 moved; 4 rerun; 1 map failed"
    )


def test_a_summary_of_work_that_was_stopped() -> None:
    work, _ = new_work(3000)
    work.step(1)
    work.workers = {"worker0": WorkerShare(1, 0.5)}
    assert summary("", MAP, work, 1.0, KeyboardInterrupt) == (
        "maps stopped by KeyboardInterrupt: 1 of 3,000 steps, 1 part in 1.0 s; worker0 1 (0.5 s)"
    )


def test_a_summary_of_maps_alone() -> None:
    assert summary("", MAP, new_work()[0], 1.0, None) == "maps: 0 maps, 0 parts in 1.0 s"


def test_a_summary_of_many_workers() -> None:
    work, _ = new_work()
    work.jobs_begun = 1
    work.workers = {f"worker{rank}": WorkerShare(100 + rank, 10.0 + rank) for rank in range(64)}
    work.workers["worker3"].is_lost = True
    assert summary("", MAP, work, 74.0, None) == (
        "maps: 1 map, 8,416 parts in 1:14; 64 workers, 1 lost"
    )


@pytest.mark.parametrize(
    ("seconds", "short", "long"),
    [(0.0, "0:00", "0.0 s"), (59.99, "0:59", "60.0 s"), (61.0, "1:01", "1:01")],
)
def test_times(seconds: float, short: str, long: str) -> None:
    assert clock(seconds) == short
    assert duration(seconds) == long


def test_hours() -> None:
    assert clock(3600 * 27 + 62) == "27:01:02"


def test_plurals() -> None:
    assert [counted(2000, noun) for noun in ("part", "batch", "loss")] == [
        "2,000 parts",
        "2,000 batches",
        "2,000 losses",
    ]
    assert counted(1, "batch") == "1 batch"


def test_names_of_functions_are_short() -> None:
    assert short("inner_loop") == "inner_loop"
    assert short("package.module.Class.method") == "method"
    assert short("module.make.<locals>.inner") == "inner"
    assert short("module.inner__parallelize_async_unwrapped__") == "inner"
