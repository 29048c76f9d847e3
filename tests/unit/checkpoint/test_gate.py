"""Tests the gate alone; numbers stand for the workers."""

from __future__ import annotations

from torchweft.checkpoint.gate import _Gate


def test_it_is_closed_when_the_last_step_has_ended_and_lets_nobody_through() -> None:
    gate = _Gate()
    gate.begin((1, "a"), False)
    gate.begin((2, "b"), False)
    closing = gate.begin((0, "c"), True)
    late = gate.begin((1, "d"), False)
    gate.end((1, "a"))
    assert not closing.done()
    gate.end((2, "b"))
    assert closing.done()
    assert not late.done()
    gate.end((0, "c"))
    assert late.done()
    assert gate.inside() == {1}


def test_who_gives_up_waiting_leaves_nothing_behind() -> None:
    gate = _Gate()
    gate.begin((1, "a"), False)
    closing = gate.begin((0, "b"), True)
    waiting = gate.begin((2, "c"), False)
    gate.end((0, "b"))
    assert waiting.done()
    gate.end((1, "a"))
    gate.end((2, "c"))
    assert not closing.done()
    gate.begin((0, "d"), True)
    given_up = gate.begin((1, "e"), False)
    gate.end((1, "e"))
    gate.end((0, "d"))
    assert not given_up.done()
    assert gate.inside() == set()


def test_a_lost_worker_has_ended_all_it_had_begun() -> None:
    gate = _Gate()
    gate.begin((1, "a"), False)
    closing = gate.begin((0, "b"), True)
    gate.begin((1, "c"), False)
    gate.end_lost(lambda worker: worker == 1)
    assert closing.done()
    waiting = gate.begin((2, "d"), False)
    gate.end_lost(lambda worker: worker == 0)
    assert waiting.done()
    assert gate.inside() == {2}
