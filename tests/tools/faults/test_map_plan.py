from __future__ import annotations

from tests.faults.map_plan import INNER, NESTED, POINTS, SHAPES, STEPS, WAYS, draw_maps
from tests.faults.plan import FATAL, TRAINER, Plan

SEVERAL = [draw_maps(number) for number in range(400)]


def victims(plan: Plan) -> set[str]:
    return {fault.victim for fault in plan.faults if fault.kind in FATAL}


def test_a_number_is_always_the_same_plan() -> None:
    assert [draw_maps(number) for number in range(len(SEVERAL))] == SEVERAL


def test_all_kinds_of_programs_are_drawn_and_all_points() -> None:
    programs = [plan.program for plan in SEVERAL if plan.program is not None]
    assert {(each.shape, each.way) for each in programs} == {(s, w) for s in SHAPES for w in WAYS}
    points = {fault.point for plan in SEVERAL for fault in plan.faults}
    assert points == {"", *POINTS}


def test_somebody_is_left_to_run_parts() -> None:
    for plan in SEVERAL:
        assert plan.program is not None
        left = set(plan.ranks) - victims(plan) - {TRAINER}
        is_caller_enough = plan.program.takes_part and plan.program.shape not in (NESTED, INNER)
        assert left or is_caller_enough
        assert plan.leader == TRAINER
        assert all(fault.step < STEPS for fault in plan.faults)
        assert str(plan.program) in str(plan)
