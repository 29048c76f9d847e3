from __future__ import annotations

from torchweft.pipeline.schedules.synchronous import Lane, Phase, write_row

LANE = Lane([(0, 0), (0, 1), (0, 2)], [(0, 0), (0, 1), (0, 2)])


def written(*phases: Phase) -> str:
    return " ".join(map(str, write_row(phases, LANE)))


def test_a_name_with_nothing_left_to_do_is_passed_over() -> None:
    assert written(Phase(2, "F0"), Phase(5, "F0 B0")) == "0F0 0F1 0F2 0B0 0B1 0B2"


def test_weight_parts_are_those_of_the_oldest_input_parts() -> None:
    row = written(Phase(3, "F0"), Phase(1, "W"), Phase(2, "I0"), Phase(9, "I0 W"))
    assert row == "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2"


def test_lanes_have_their_own_order_and_share_weight_parts() -> None:
    other = Lane([(5, 1), (5, 0)], [(5, 0), (5, 1)])
    row = write_row([Phase(2, "F1 F0 I1 I0"), Phase(4, "W")], LANE, other)
    assert " ".join(map(str, row)) == "5F1 0F0 5I0 0I0 5F0 0F1 5I1 0I1 5W0 0W0 5W1 0W1"
