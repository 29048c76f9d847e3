from __future__ import annotations

import dataclasses

import pytest

from benchmarks.__main__ import possible, questions
from benchmarks.frame import Question
from benchmarks.frame.run import parse_options

QUESTIONS = questions()


@pytest.fixture(params=QUESTIONS)
def question(request: pytest.FixtureRequest) -> Question:
    return QUESTIONS[request.param]


def test_rows_have_names_of_their_own(question: Question) -> None:
    names = [row.name for row in question.rows]
    assert len(set(names)) == len(names)


def test_short_form_judges_a_target_with_sides_that_take_part(question: Question) -> None:
    options = parse_options(question, ["--short"])
    sides = {side.name for side in options.sides}
    judged = [(row, target) for row in options.rows for target in row.targets]
    assert judged
    for row, target in judged:
        other = {"torch": row.torch, "limit": row.limit, "bound": row.ours}[target.against]
        assert {row.ours, other} <= sides


def test_full_form_has_all_rows_and_placements(question: Question) -> None:
    options = parse_options(question, [])
    assert options.rows == list(question.rows)
    assert options.rounds == question.full.rounds
    assert set(options.placements) <= {"a core each", "not pinned", "one core"}


def test_a_question_is_left_out_where_it_cannot_be_answered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = QUESTIONS["calls"]
    found = {"here": calls, "absent": dataclasses.replace(calls, is_possible=lambda: False)}
    assert possible(found) == ["here"]
    assert "skipping absent" in capsys.readouterr().err
