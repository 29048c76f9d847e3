"""The page on watching a group: its programs run unchanged, and leave whole traces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contract.end_to_end.apart import LIMIT_S
from tests.inside import RunPage
from tests.pages import python_of
from tests.trace_reader import read_trace

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def program_with(text: str) -> str:
    (block,) = [each for each in python_of("docs/observing.md") if text in each]
    return block


def test_the_metrics_show_the_calls_of_a_worker(run: RunPage, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra 'metrics'")
    (tmp_path / "served.py").write_text(program_with("metrics.serve("))
    labels = 'rpc_method="builtins.max",rpc_system_name="torchweft",weft_worker="worker0"'
    assert f"weft_rpc_server_calls_total{{{labels}}} 3.0" in run(tmp_path / "served.py")


def test_the_spans_of_a_step_are_one_trace(run: RunPage, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra 'otel', and its SDK")
    (tmp_path / "spanned.py").write_text(program_with("observe.spans()"))
    lines = run(tmp_path / "spanned.py")
    assert sum(line.endswith("42") and " " not in line.strip() for line in lines) == 1
    spans = [line.split()[-3:] for line in lines if "__main__." in line or "step" in line]
    spans += [line.split()[-3:] for line in lines if line.endswith("multiply")]
    traces = {name for *_, name in spans}
    assert {"step", "multiply", "__main__.double_on", "__main__.double"} <= traces
    of_step = {trace for trace, _, name in spans if not name.endswith("begin")}
    assert len(of_step) == 1
    calls = sorted((kind, name) for _, kind, name in spans if name.startswith("__main__.double"))
    assert calls == [
        ("CLIENT", "__main__.double"),
        ("CLIENT", "__main__.double_on"),
        ("SERVER", "__main__.double"),
        ("SERVER", "__main__.double_on"),
    ]


def test_the_trace_shows_a_step(run: RunPage, tmp_path: Path) -> None:
    block = program_with("observe.trace(")
    (tmp_path / "traced.py").write_text(block)
    head, *lines = run(tmp_path / "traced.py")
    assert re.match(r"context \d+: 3 workers, 11 messages", head)
    assert sum("backward  on worker" in line for line in lines) == 2
    found = read_trace(tmp_path / "step.json")
    assert {found.worker_of(each) for each in found.slices} == {"driver", "worker0", "worker1"}
    layers = [each for each in found.of("run") if each["name"] == "__main__.layer"]
    assert len(layers) == 2
    steps = {found.worker_of(each) for each in found.of("optimizer")}
    assert steps == {"driver", "worker0", "worker1"}
