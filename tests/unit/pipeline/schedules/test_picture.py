from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from torchweft.pipeline.schedules import (
    Costs,
    Kind,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    SchedulePipeDream,
    ScheduleZBVZeroBubble,
    Table,
    predict,
)

SVG = "{http://www.w3.org/2000/svg}"


def drawn(table: Table, costs: Costs | None = None) -> ElementTree.Element:
    costs = Costs.uniform(table.n_stages) if costs is None else costs
    return ElementTree.fromstring(predict(table, costs).svg())


def texts(picture: ElementTree.Element, name: str) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text") if text.get("class") == name]


def boxes(picture: ElementTree.Element) -> dict[float, list[tuple[float, float]]]:
    """Returns the left and right end of each action's box, by row."""
    rows: dict[float, list[tuple[float, float]]] = {}
    for box in picture.iter(f"{SVG}rect"):
        if box.get("class") == "box":
            x, y, width = (float(box.attrib[name]) for name in ("x", "y", "width"))
            rows.setdefault(y, []).append((x, x + width))
    return rows


TABLES = [
    Schedule1F1B(8).table(4),
    ScheduleZBVZeroBubble(8).table(4),
    Schedule1F1B(32).table(8),
    ScheduleZBVZeroBubble(32).table(8),
    ScheduleInterleaved1F1B(8, 3).table(4),
]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.name}-{table.n_workers}")
def test_every_action_has_a_box_and_a_label_that_fit(table: Table) -> None:
    picture = drawn(table)
    rows = boxes(picture)
    assert [len(row) for row in rows.values()] == [len(row) for row in table.rows]
    assert len(texts(picture, "label")) == sum(map(len, table.rows))
    _, _, width, _ = map(float, picture.attrib["viewBox"].split())
    for row in rows.values():
        assert all(after[0] >= before[1] - 0.11 for before, after in pairwise(row))
        assert all(right - left >= 6 * 2 for left, right in row)
        assert max(right for _, right in row) < width < 4100


def test_the_title_has_the_idle_share_and_the_axis_the_time() -> None:
    picture = drawn(TABLES[0])
    title = "Schedule1F1B: 4 workers, 4 stages, 8 micro-batches, 27.3 % idle"
    assert texts(picture, "title") == [title]
    assert texts(picture, "tick") == ["0", "5", "10", "15", "20", "25", "30"]
    assert texts(picture, "name") == ["worker 0", "worker 1", "worker 2", "worker 3", "time"]
    assert texts(picture, "note") == ["forward", "backward"]


def test_each_box_tells_its_action_and_time() -> None:
    tips = [tip.text for group in drawn(TABLES[0]).iter(f"{SVG}g") for tip in group[:1]]
    assert tips[:3] == ["0F0: 0 to 1", "0F1: 1 to 2", "0F2: 2 to 3"]
    assert "3B7: 25 to 27" in tips


def test_colours_tell_kinds_stages_and_neighbouring_microbatches_apart() -> None:
    colours: dict[str, str] = {}
    for group in drawn(TABLES[1]).iter(f"{SVG}g"):
        tip, box, _ = group
        colours[(tip.text or "").split(":")[0]] = box.attrib["fill"]
    assert len(colours) == 8 * 8 * 3
    first = [colours[name] for name in ("0F0", "0F1", "7F0", "0I0", "0W0", "7I0", "7W0")]
    assert len(set(first)) == len(first)
    assert colours["0F3"] == colours["1F3"]


def test_updates_are_shown_with_or_without_a_duration() -> None:
    table = SchedulePipeDream(5).table(2)
    for costs in (Costs.uniform(2), Costs.uniform(2, update_s=0.01)):
        picture = drawn(table, costs)
        assert [len(row) for row in boxes(picture).values()] == [15, 15]
        assert float(picture.attrib["width"]) < 1000
    assert "5 minibatches" in texts(picture, "title")[0]


def test_very_different_durations_make_no_endless_picture() -> None:
    lengths = {(stage, kind): 1.0 for stage in range(2) for kind in Kind}
    table = Schedule1F1B(4).table(2)
    picture = drawn(table, Costs(lengths | {(0, Kind.FORWARD): 1e-6}))
    assert float(picture.attrib["width"]) < 4100
    assert len(texts(picture, "label")) < sum(map(len, table.rows))


def test_a_name_is_no_markup() -> None:
    table = Schedule1F1B(1).table(1)
    named = Table("<b>&", table.n_stages, table.n_microbatches, table.rows)
    assert texts(drawn(named), "title")[0].startswith("<b>&: 1 workers")
    free = Costs.uniform(1, forward_s=0, input_s=0, weight_s=0)
    assert texts(drawn(named, free), "tick") == ["0"]


def test_timelines_are_drawn_below_each_other_on_one_axis() -> None:
    table = TABLES[0]
    slow = replace(predict(table, Costs.uniform(4, forward_s=2)), is_measured=True)
    fast = predict(table, Costs.uniform(4))
    both, alone = ElementTree.fromstring(slow.svg(fast)), ElementTree.fromstring(slow.svg())
    assert texts(both, "title") == [slow.title, fast.title]
    assert texts(both, "name") == [f"worker {n}" for n in (0, 1, 2, 3)] * 2 + ["time"]
    assert texts(alone, "name")[-1] == "time, s"
    rows = list(boxes(both).values())
    assert len(rows) == 8
    scales = [max(end for row in half for _, end in row) - 78 for half in (rows[:4], rows[4:])]
    assert scales[0] / scales[1] == pytest.approx(slow.makespan_s / fast.makespan_s, rel=0.01)
    _, _, _, height = map(float, both.attrib["viewBox"].split())
    assert max(boxes(both)) + 26 < height


def test_an_action_that_is_short_by_chance_does_not_widen_the_picture() -> None:
    table = Schedule1F1B(32).table(4)
    costs = {(stage, kind): 1.0 for stage in range(4) for kind in Kind}
    usual = drawn(table, Costs(costs))
    odd = drawn(table, Costs(costs | {(3, Kind.FORWARD): 0.001}))
    widths = [float(picture.attrib["width"]) for picture in (usual, odd)]
    assert widths[1] <= 4 * widths[0]
