"""The gate: what it compares, and when it is closed. Measurements are made up here."""

from __future__ import annotations

import pytest

from benchmarks.frame.figures import Round
from benchmarks.gate.gate import (
    compared,
    is_open,
    medians,
    ratios_of,
    slower,
    verdict,
)
from benchmarks.shapes.question import QUESTION


def _rounds(base_s: list[float], ours_s: list[float]) -> dict[tuple[str, str], list[Round]]:
    sides = {"base": base_s, "weft": ours_s}
    return {
        (side, "tensor"): [Round([1.0], cpu_s) for cpu_s in values]
        for side, values in sides.items()
    }


def test_the_ratio_is_the_median_over_rounds_of_cpu_time_alone(tmp_path):
    question = compared(QUESTION, tmp_path)
    measured = _rounds([1.0, 1.0, 1.0], [1.05, 1.2, 9.0])
    assert ratios_of(question.rows, measured) == {"tensor": pytest.approx(1.2)}


def test_the_median_over_groups_of_processes_decides():
    measured = [{"tensor": 1.3, "error": 0.9}, {"tensor": 1.0}, {"tensor": 1.05, "error": 1.1}]
    assert medians(measured) == {"tensor": 1.05, "error": pytest.approx(1.0)}


def test_one_slow_row_closes_the_gate():
    assert is_open({"tensor": 1.1, "error": 0.5}, 1.1)
    assert not is_open({"tensor": 1.11, "error": 0.5}, 1.1)
    assert slower({"tensor": 1.11, "error": 0.5}, 1.1) == ["tensor"]


def test_the_gate_is_closed_when_nothing_was_measured():
    assert not is_open({}, 1.1)


def test_the_verdict_names_the_slow_row_first():
    lines = verdict({"error": 0.5, "tensor": 2.0}, 1.1, "abc")
    assert "tensor   too slow" in lines[1]
    assert lines[-1].split()[0] == "1.00"
