"""Tests the gate alone; numbers stand for the workers."""

from __future__ import annotations

from torchweft.checkpoint.gate import _Gate


def test_steps_go_through_side_by_side() -> None:
    gate = _Gate()
    assert gate.enter("a", 1).done()
    assert gate.enter("b", 2).done()
    assert gate.inside() == {1, 2}


def test_it_is_closed_when_the_last_step_has_ended_and_lets_nobody_through() -> None:
    gate = _Gate()
    gate.enter("a", 1)
    gate.enter("b", 2)
    closing = gate.close("c", 0)
    late = gate.enter("d", 1)
    gate.end("a", 1)
    assert not closing.done()
    gate.end("b", 2)
    assert closing.done()
    assert not late.done()
    gate.end("c", 0)
    assert late.done()
    assert gate.inside() == {1}


def test_two_may_close_it_at_the_same_time() -> None:
    gate = _Gate()
    assert gate.close("a", 0).done()
    assert gate.close("b", 1).done()
    waiting = gate.enter("c", 2)
    gate.end("a", 0)
    assert not waiting.done()
    gate.end("b", 1)
    assert waiting.done()


def test_who_gives_up_waiting_leaves_nothing_behind() -> None:
    gate = _Gate()
    gate.enter("a", 1)
    closing = gate.close("b", 0)
    waiting = gate.enter("c", 2)
    gate.end("b", 0)
    assert waiting.done()
    gate.end("a", 1)
    gate.end("c", 2)
    assert not closing.done()
    gate.close("d", 0)
    given_up = gate.enter("e", 1)
    gate.end("e", 1)
    gate.end("d", 0)
    assert not given_up.done()
    assert gate.inside() == set()


def test_a_lost_worker_has_ended_all_it_had_begun() -> None:
    gate = _Gate()
    gate.enter("a", 1)
    closing = gate.close("b", 0)
    gate.enter("c", 1)
    gate.lost(1)
    assert closing.done()
    waiting = gate.enter("d", 2)
    gate.lost(0)
    assert waiting.done()
    assert gate.inside() == {2}


def test_a_worker_ends_only_what_it_has_begun() -> None:
    gate = _Gate()
    gate.enter("a", 1)
    closing = gate.close("b", 0)
    gate.end("a", 2)
    gate.end("b", 2)
    gate.close("a", 2)
    gate.end("a", 2)
    assert gate.inside() == {1}
    assert not closing.done()
    gate.end("a", 1)
    assert closing.done()
