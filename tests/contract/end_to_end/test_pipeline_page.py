"""The page on pipelines: its programs run unchanged, its table and its messages are true."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.contract.end_to_end.apart import LIMIT_S
from tests.inside import RunPage
from tests.pages import figure_of, python_of, text_of
from torchweft import pipeline
from torchweft.pipeline.schedules import Costs, Schedule, predict

PAGE = "docs/pipeline.md"

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def alone(guide: Path) -> list[float]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(guide / "alone.py"), run_name="__main__")
    return [figure_of(line) for line in printed.getvalue().splitlines()]


@pytest.mark.parametrize("name", ["on_workers.py", "planned.py"])
def test_a_pipeline_computes_the_same_as_one_process(run: RunPage, guide: Path, name: str) -> None:
    expected = alone(guide)
    assert len(expected) == 5
    lines = run(guide / name)
    steps = [figure_of(line) for line in lines if line.startswith("step ")]
    # The tolerance is that of the printed digits.
    assert steps[:5] == pytest.approx(expected, abs=2e-4)
    assert name == "on_workers.py" or len(lines) > 8  # the plan


def test_parameter_groups_are_those_of_one_process(run: RunPage, guide: Path) -> None:
    names, groups = (runpy.run_path(str(guide / name)) for name in ("alone.py", "groups.py"))
    model = names["build_model"]()
    optimizer = groups["decay_matrices"](list(model.parameters()), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    expected = []
    for step in range(5):
        x, y = names["draw_batch"](step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        expected.append(loss.item())
    *lines, last = run(guide / "groups.py")
    assert [figure_of(line) for line in lines] == pytest.approx(expected, abs=2e-4)
    assert last == "[8, 8]"


def test_skip_connections_and_tied_weights_compute_the_same(run: RunPage, guide: Path) -> None:
    names = runpy.run_path(str(guide / "wired.py"))
    encode, middle, decode = names["build_stages"]()
    model = nn.ModuleList([encode, middle, decode])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for step in range(5):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        encoded = encode(x)
        output = decode(middle(encoded["hidden"]), x, mean=encoded["mean"])
        loss = nn.functional.mse_loss(output, x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    found = [figure_of(line) for line in run(guide / "wired.py")]
    assert found == pytest.approx(expected, abs=2e-4)


def losses_alone(guide: Path, steps: int) -> list[float]:
    names = runpy.run_path(str(guide / "alone.py"))
    model = names["build_model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    found = []
    for step in range(steps):
        x, y = names["draw_batch"](step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_training_survives_a_worker(run: RunPage, guide: Path) -> None:
    expected = losses_alone(guide, 12)
    lines = run(guide / "surviving.py")
    lost = lines.index("lost worker1: step 5 again, on worker0 and worker2")
    steps = [figure_of(line) for line in lines if line.startswith("step ")]
    assert steps[:lost] == pytest.approx(expected[:lost], abs=2e-4)
    assert steps[lost:] == pytest.approx(expected[5:], abs=2e-4)


def test_layers_freeze(run: RunPage, guide: Path) -> None:
    lines = run(guide / "freezing.py")
    shapes = [line.partition(", ")[2] for line in lines]
    assert shapes == [
        "Shape(n_frozen=0, cuts=(4,), replicas=(1, 1))",
        "Shape(n_frozen=4, cuts=(), replicas=(2,))",
        "Shape(n_frozen=6, cuts=(), replicas=(2,))",
        "Shape(n_frozen=7, cuts=(), replicas=(2,))",
    ]


def test_the_timeline_is_reported_and_drawn(run: RunPage, guide: Path) -> None:
    lines = run(guide / "timeline.py")
    shown = next(block for block in text_blocks() if "activations held" in block)
    assert lines[0] == "Schedule1F1B, 5 steps measured"
    assert lines[1:3] == shown.strip().splitlines()[1:3]
    assert [line.split()[0] for line in lines[3:]] == ["worker0", "worker1", "all", "step"]
    assert "measured" in (guide / "timeline.svg").read_text()
    assert json.loads((guide / "timeline.json").read_text())["traceEvents"]


def text_blocks() -> list[str]:
    return text_of(PAGE).split("```\n")


def test_the_table_of_schedules_is_that_of_the_predictions() -> None:
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:4]]
        for line in text_of(PAGE).splitlines()
        if line.startswith("| `Schedule")
    ]
    assert len(rows) == 9
    for name, idle, activations in rows:
        table = make(name, 8).table(4)
        share = 4 / table.n_stages
        costs = Costs.uniform(table.n_stages, forward_s=share, input_s=share, weight_s=share)
        timeline = predict(table, costs)
        assert idle == f"{100 * timeline.idle_share:.1f} %", name
        assert activations == f"{share * max(timeline.peak_activations):.1f}", name
    more = pipeline.Schedule1F1B(32).table(4)
    idle_share = predict(more, Costs.uniform(4)).idle_share
    assert f"leaves {100 * idle_share:.1f} % idle" in text_of(PAGE).replace("\n", " ")


def make(name: str, n_microbatches: int) -> Schedule:
    made: Schedule = getattr(pipeline, name)(n_microbatches)
    return made


def test_the_prediction_without_a_worker_runs() -> None:
    (block,) = [block for block in python_of(PAGE) if "__main__" not in block]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block, {"Schedule1F1B": pipeline.Schedule1F1B})
    assert figure_of(printed.getvalue()) == pytest.approx(3 / 11)
