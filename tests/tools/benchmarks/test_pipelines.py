from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.frame.figures import Round
from benchmarks.frame.placement import placements
from benchmarks.pipelines import question as pipelines
from benchmarks.pipelines.cases import CASES, MICROBATCHES
from benchmarks.pipelines.question import OVERHEAD, QUESTION


def options_for(*names: str) -> Namespace:
    rows = [row for row in QUESTION.rows if row.name in names]
    return Namespace(rows=rows, rounds=2, failures=[])


def test_overhead_is_the_cpu_time_beyond_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "gpipe small"
    cpu_s = {"torch": (9e-3, 8e-3), "weft": (4e-3, 5e-3), "arithmetic": (1e-3, 2e-3)}
    asked: list[str] = []

    def measured(question: object, options: Namespace, cores: object) -> object:
        asked.extend(row.name for row in options.rows)
        return {(side, name): [Round([1.0], each) for each in cpu_s[side]] for side in cpu_s}

    monkeypatch.setattr(pipelines, "measure", measured)
    cores = placements()["not pinned"]
    rounds = pipelines.measure_pipelines(QUESTION, options_for(OVERHEAD + name), cores)
    assert asked == [name]  # The step is measured, though only its overhead was chosen.
    for side, both in (("torch", (8e-3, 6e-3)), ("weft", (3e-3, 3e-3))):
        values = [each.values[0] for each in rounds[side, OVERHEAD + name]]
        assert values == pytest.approx([each / MICROBATCHES for each in both])


def test_every_case_has_a_step_and_its_overhead() -> None:
    assert {row.name for row in QUESTION.rows} == {*CASES, *(OVERHEAD + name for name in CASES)}


def test_sizes_are_those_of_their_titles() -> None:
    assert [
        4 * CASES[f"gpipe {size}"].rows * CASES[f"gpipe {size}"].width
        for size in ("small", "64k", "1m")
    ] == [512, 64 << 10, 1 << 20]
