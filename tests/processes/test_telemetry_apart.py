"""Spans and metrics of groups of their own: strict workers, and what ends with a group."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra 'metrics'")
pytest.importorskip("opentelemetry.sdk", reason="needs the extra 'otel', and its SDK")

import torchweft
from tests.contract.processes import functions
from tests.contract.processes.functions import options
from tests.processes.telemetry import CLIENT, here, seen, start, stop_plainly, values
from torchweft import observe, rpc
from torchweft.errors import ConfigurationError, ObserveError
from torchweft.launch import Nursery


def test_a_strict_worker_serves_calls_that_carry_a_context(nursery: Nursery) -> None:
    callables = (functions.identity, functions.call_through, start, stop_plainly)
    strict = options(strict=True, callables=callables)  # type: ignore[arg-type]
    with torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=strict):
        rpc.rpc_sync("worker0", start)
        here().spans.start()
        assert rpc.rpc_sync("worker0", functions.identity, args=(1,)) == 1
        here().spans.stop()
        (made,) = [seen(span) for span in here().exporter.get_finished_spans()]
        served = rpc.rpc_sync("worker0", stop_plainly)
    assert (made.kind, made.parent, made.is_error) == (CLIENT, 0, False)
    assert (made.name, True, made.trace, made.id) in served


def test_spans_are_on_once_and_end_with_the_group(nursery: Nursery) -> None:
    with torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=options()):
        first_spans = observe.spans()
        with first_spans:
            with pytest.raises(ObserveError, match="'driver'"):
                first_spans.start()
            with pytest.raises(ObserveError, match="stop those first"):
                observe.spans().start()
        observe.spans().start()
    first_spans.stop()  # Nothing happens.


def test_metrics_of_one_worker_end_with_its_group(nursery: Nursery) -> None:
    with torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=options()):
        server = observe.metrics.serve()
        assert {worker for _, worker, _ in values(server.url)} == {"driver"}
        with pytest.raises(ConfigurationError, match="pass another port, or 0"):
            observe.metrics.serve(server.port)
        names = {metric.name for metric in observe.metrics.read()}
        assert {"process.cpu.time", "weft.rpc.client.active", "weft.worker.up"} <= names
    with pytest.raises(OSError):
        values(server.url)
