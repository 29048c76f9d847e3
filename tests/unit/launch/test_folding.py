"""Equal lines of many workers, in random orders: none is lost, and each worker's stay in order."""

from __future__ import annotations

import math
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from torchweft.launch.folding import HOLD_S, Folding


class Label(NamedTuple):
    name: str


A, B, C = map(Label, "abc")
WARNING = b"/x/train.py:7: UserWarning: slow"

LINES = st.lists(
    st.tuples(st.sampled_from((A, B, C)), st.sampled_from((b"x", b"y", b"z")), st.booleans())
)


def taken(folding: Folding[Label], now_s: float = math.inf) -> list[tuple[str, bytes]]:
    return [
        ("".join(label.name for label in held.labels), held.line) for held in folding.take(now_s)
    ]


def test_equal_lines_join_those_that_are_held() -> None:
    folding: Folding[Label] = Folding()
    for label in (A, B, C):
        folding.add(label, b"x", 1.0)
        folding.add(label, b"y", 1.0)
    assert folding.due_s() == 1.0 + HOLD_S
    assert taken(folding, 1.0) == []
    assert taken(folding) == [("abc", b"x"), ("abc", b"y")]
    folding.add(A, b"x", 2.0)
    assert taken(folding) == [("a", b"x")]
    assert folding.due_s() is None


def test_a_line_does_not_overtake_one_of_its_worker() -> None:
    folding: Folding[Label] = Folding()
    folding.add(A, b"x", 0.0)
    folding.add(B, b"y", 0.0)
    folding.add(B, b"x", 0.0)
    folding.add(A, b"x", 0.0)
    assert taken(folding) == [("a", b"x"), ("b", b"y"), ("ba", b"x")]


@given(LINES)
def test_no_line_is_lost_and_each_workers_lines_keep_their_order(
    lines: list[tuple[Label, bytes, bool]],
) -> None:
    folding: Folding[Label] = Folding()
    found: list[tuple[str, bytes]] = []
    for now_s, (label, line, is_late) in enumerate(lines):
        folding.add(label, line, now_s * HOLD_S / 10)
        if is_late:
            found += taken(folding, now_s * HOLD_S / 10)
    found += taken(folding)
    for label in (A, B, C):
        given_lines = [line for each, line, _ in lines if each == label]
        assert [line for names, line in found if label.name in names] == given_lines


def test_a_warning_that_another_worker_has_shown_is_left_out_with_its_line() -> None:
    folding: Folding[Label] = Folding()
    for label in (A, B):
        folding.add(label, WARNING, 0.0)
        folding.add(label, b"  step()", 0.0)
    assert taken(folding) == [("ab", WARNING), ("ab", b"  step()")]
    folding.add(C, WARNING, 5.0)
    folding.add(C, b"  step()", 5.0)
    folding.add(C, b"  indented", 5.0)
    assert taken(folding) == [("c", b"  indented")]
    folding.add(A, WARNING, 6.0)  # Its own filter has let it through.
    assert taken(folding) == [("a", WARNING)]
