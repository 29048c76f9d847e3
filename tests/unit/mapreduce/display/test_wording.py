"""The words, exactly."""

from __future__ import annotations

import pytest

from torchweft.mapreduce.display.activity import ActivityView, Loss, MapView, WorkerShare
from torchweft.mapreduce.display.steps import Steps
from torchweft.mapreduce.display.stragglers import Straggler
from torchweft.mapreduce.display.wording import (
    clock,
    duration,
    fitted,
    live_lines,
    log_line,
    news_line,
    short,
    summary,
    width,
)

NOTHING = ActivityView((), 0, 0, 0, 0, {}, ())
STRAGGLER = Straggler("worker2", 7, "inner_loop", 2.1, 0.4)
ONE_MAP = MapView(
    "inner_loop", 8, 5, {"worker0": 1, "worker1": 0, "worker2": 1}, frozenset({"worker1"})
)
BUSY = ActivityView((ONE_MAP,), 13, 101, 0, 0, {}, (STRAGGLER,))


def twelve_steps() -> Steps:
    steps = Steps(3000, 0.0)
    for step in range(1, 13):
        steps.add(1, {"loss": 0.43125, "accuracy": 0.91}, step / 1.9)
    return steps


def test_on_a_wide_terminal() -> None:
    assert live_lines("meta-step", twelve_steps(), BUSY, 12 / 1.9, 120, 30) == [
        "meta-step 12/3000  1.9 steps/s  26:12 left  loss 0.4313  accuracy 0.91",
        "parts 5/8 of inner_loop  running: worker0 1  worker1 lost  worker2 1",
        "worker2 is behind: part 7 for 2.1 s (median 0.4 s)",
    ]


def test_on_a_narrow_terminal() -> None:
    assert live_lines("meta-step", twelve_steps(), BUSY, 12 / 1.9, 44, 30) == [
        "meta-step 12/3000  1.9 steps/s  26:12 left",
        "loss 0.4313  accuracy 0.91",
        "parts 5/8 of inner_loop  running: worker0 1",
        "worker1 lost  worker2 1",
        "worker2 is behind: part 7 for 2.1 s (med...",
    ]


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (2, 2), (5, 3), (17, 4), (40, 5), (400, 3)])
def test_it_fits_whatever_the_size(columns: int, rows: int) -> None:
    lines = live_lines("ünï 漢字", twelve_steps(), BUSY, 7.0, columns, rows)
    assert len(lines) <= max(rows - 2, 1)
    assert all(width(line) <= max(columns - 1, 1) for line in lines)


def test_steps_that_are_slow_and_have_no_end() -> None:
    steps = Steps(None, 0.0)
    steps.add(1, {}, 4.2)
    assert live_lines("", steps, NOTHING, 5.0, 80, 24) == ["step 1  4.2 s a step"]


def test_before_the_first_step() -> None:
    assert live_lines("", Steps(10, 0.0), NOTHING, 5.0, 80, 24) == ["step 0/10"]


def test_maps_without_steps() -> None:
    assert live_lines("", Steps(None, 0.0), BUSY, 5.0, 80, 24)[0] == "map 13  101 parts done"
    assert live_lines("warm-up", Steps(None, 0.0), BUSY, 5.0, 80, 24)[0] == (
        "warm-up: map 13  101 parts done"
    )


def test_many_workers_are_counted() -> None:
    running = {f"worker{rank}": rank % 3 for rank in range(64)}
    view = NOTHING._replace(maps=(MapView("inner_loop", 640, 100, running, frozenset()),))
    assert live_lines("", Steps(10, 0.0), view, 0.0, 80, 24)[1:] == [
        "parts 100/640 of inner_loop  running: 63 on 42 of 64 workers"
    ]


def test_several_maps_and_many_stragglers() -> None:
    view = NOTHING._replace(maps=(ONE_MAP,) * 5, stragglers=(STRAGGLER,) * 4)
    assert live_lines("", Steps(10, 0.0), view, 0.0, 80, 24)[3:] == [
        "parts 5/8 of inner_loop  running: worker0 1  worker1 lost  worker2 1",
        "and 2 maps more",
        "worker2 is behind: part 7 of inner_loop for 2.1 s (median 0.4 s)",
        "worker2 is behind: part 7 of inner_loop for 2.1 s (median 0.4 s)",
        "worker2 is behind: part 7 of inner_loop for 2.1 s (median 0.4 s)",
        "and 1 more are behind",
    ]


def test_a_line_of_a_log() -> None:
    assert log_line("meta-step", twelve_steps(), BUSY, 12 / 1.9) == (
        "meta-step 12/3000  1.9 steps/s  26:12 left  loss 0.4313  accuracy 0.91  "
        "parts 5/8 of inner_loop"
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
        (Loss("wor\x1b[2Jker\n2", ()), "wor[2Jker2 was lost"),
    ],
)
def test_news(news: Loss | Straggler, line: str) -> None:
    assert news_line(news) == line


def test_a_summary() -> None:
    view = NOTHING._replace(
        maps_begun=12,
        parts=1204,
        moved=12,
        rerun=4,
        workers={
            "worker0": WorkerShare(1000, 100.0),
            "worker1": WorkerShare(4, 0.6, is_lost=True),
            "worker2": WorkerShare(200, 50.0, times_behind=3),
        },
    )
    steps = Steps(12, 0.0)
    steps.add(12, {}, 60.0)
    assert summary("meta-step", steps, view, 83.2, None) == (
        "meta-step: 12 steps, 1,204 parts in 1:23; "
        "worker0 1,000 (1:40), worker1 4 (0.6 s, lost), worker2 200 (50.0 s, 3 behind); "
        "12 moved; 4 rerun; slowest worker2: 0.25 s a part, median 0.15 s"
    )


def test_a_summary_of_what_was_stopped() -> None:
    steps = Steps(3000, 0.0)
    steps.add(1, {}, 1.0)
    view = NOTHING._replace(maps_begun=1, parts=1, workers={"worker0": WorkerShare(1, 0.5)})
    assert summary("", steps, view, 1.0, KeyboardInterrupt) == (
        "maps stopped by KeyboardInterrupt: 1 of 3,000 steps, 1 part in 1.0 s; worker0 1 (0.5 s)"
    )


def test_a_summary_of_maps_alone() -> None:
    assert summary("", Steps(None, 0.0), NOTHING, 1.0, None) == "maps: 0 maps, 0 parts in 1.0 s"


def test_a_summary_of_many_workers() -> None:
    workers = {f"worker{rank}": WorkerShare(100 + rank, 10.0 + rank) for rank in range(64)}
    workers["worker3"].is_lost = True
    view = NOTHING._replace(maps_begun=1, parts=8416, workers=workers)
    assert summary("", Steps(None, 0.0), view, 74.0, None) == (
        "maps: 1 map, 8,416 parts in 1:14; 64 workers with 100 to 163 parts and 10.0 s to 1:13, "
        "1 lost; slowest worker63: 0.448 s a part, median 0.316 s"
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


def test_a_text_is_cut_where_it_takes_too_much() -> None:
    assert fitted("worker", 6) == "worker"
    assert fitted("worker2", 6) == "wor..."
    assert fitted("漢字漢字", 7) == "漢字..."
    assert fitted("worker", 2) == ".."


def test_names_of_functions_are_short() -> None:
    assert short("inner_loop") == "inner_loop"
    assert short("package.module.Class.method") == "method"
    assert short("module.make.<locals>.inner") == "inner"
    assert short("module.inner__parallelize_async_unwrapped__") == "inner"
