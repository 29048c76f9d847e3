"""The text that Prometheus reads, as Prometheus' own parser reads it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra 'metrics'")

from prometheus_client.parser import text_string_to_metric_families

from tests.reports import member, report
from torchweft.errors import ConfigurationError
from torchweft.observe import prometheus
from torchweft.observe.measures import Metric, measures_of
from torchweft.observe.metrics import Server
from torchweft.reports import FunctionCounts, bucket_of
from torchweft.scraping import Address

LIMIT_S = 20.0
COUNTS = FunctionCounts('say "f"\\', "out", 3, 1, {str(bucket_of(0.01)): 2}, 0.02)


def metrics() -> list[Metric]:
    return measures_of([report("a", functions=(COUNTS,), cpu_s=1.5)], [member("b", 1)], "cafe")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_prometheus_reads_the_same_numbers(host: str) -> None:
    server = Server(Address(host, 0))
    server.begin(metrics, "test-metrics")
    try:
        with urllib.request.urlopen(server.url, timeout=LIMIT_S) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    server.close()  # Nothing happens.
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    of_f = (("rpc_method", COUNTS.function), ("rpc_system_name", "torchweft"))
    of_f += (("weft_worker", "a"),)
    assert samples["weft_rpc_client_calls_total", of_f] == 3.0
    assert samples["weft_rpc_client_errors_total", of_f] == 1.0
    assert samples["rpc_client_call_duration_seconds_count", of_f] == 2.0
    assert samples["rpc_client_call_duration_seconds_sum", of_f] == 0.02
    limits = {
        dict(labels)["le"]: value
        for (name, labels), value in samples.items()
        if name == "rpc_client_call_duration_seconds_bucket"
    }
    assert (limits["0.00390625"], limits["0.015625"], limits["+Inf"]) == (0.0, 2.0, 2.0)
    assert samples["process_cpu_time_seconds_total", (("weft_worker", "a"),)] == 1.5
    down = (("host_name", "here"), ("weft_group", "cafe"), ("weft_rank", "1"), ("weft_worker", "b"))
    assert samples["weft_worker_up", down] == 0.0


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError):
        Server(Address("127.0.0.1", taken.getsockname()[1]))


def test_connections_are_few_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_MOST_CONNECTIONS", 3)
    monkeypatch.setattr(prometheus, "_CONNECTION_S", 1.0)
    server = Server(Address("127.0.0.1", 0))
    server.begin(metrics, "metrics")
    before = threading.active_count()
    try:
        with contextlib.ExitStack() as opened:
            silent = [
                opened.enter_context(socket.create_connection(("127.0.0.1", server.port), LIMIT_S))
                for _ in range(6)
            ]
            for each in silent:
                each.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
            # The first three are closed to make place, the others when their time is up.
            for each in silent:
                with contextlib.suppress(ConnectionError):
                    assert each.recv(1) == b""
            with urllib.request.urlopen(server.url, timeout=LIMIT_S) as answer:
                assert b"rpc_client_call_duration_seconds" in answer.read()
        deadline_s = time.monotonic() + LIMIT_S
        while threading.active_count() > before:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    finally:
        server.close()
