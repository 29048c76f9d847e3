"""Metrics in the format of Prometheus, over HTTP, by the package ``prometheus_client``.

A name of OpenTelemetry becomes one of Prometheus by the rules of OpenTelemetry's specification:
dots become underscores, the unit is appended, and ``_total`` to a counter.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import CollectorRegistry
from prometheus_client.utils import floatToGoString

from torchweft.observe.measures import BOUNDS_S, COUNTER, GAUGE, Distribution, Metric
from torchweft.scraping import Address, listener

_UNITS = {"s": "seconds", "By": "bytes"}
_LIMITS = [*map(floatToGoString, BOUNDS_S), "+Inf"]
_REQUEST_S = 10.0
_MOST_CONNECTIONS = 16
"""Each has a thread; beyond it, the oldest is closed, as that of a client that sends nothing."""
_CONNECTION_S = 60.0
"""Seconds after which a connection is closed, also one that goes on byte by byte."""


def name_of(metric: Metric) -> str:
    """Returns the name of a metric in Prometheus, without ``_total`` and the like."""
    unit = _UNITS.get(metric.unit)
    name = metric.name.replace(".", "_")
    return name if unit is None else f"{name}_{unit}"


def family_of(metric: Metric) -> Any:
    """Returns a metric as a family of Prometheus."""
    keys = sorted({key for point in metric.points for key in point.attributes})
    make = {COUNTER: CounterMetricFamily, GAUGE: GaugeMetricFamily}.get(
        metric.kind, HistogramMetricFamily
    )
    labels = [key.replace(".", "_") for key in keys]
    family: Any = make(name_of(metric), metric.description, labels=labels)
    for point in metric.points:
        values = [point.attributes.get(key, "") for key in keys]
        if isinstance(point.value, Distribution):
            counts = accumulate(point.value.counts)
            family.add_metric(values, list(zip(_LIMITS, counts, strict=True)), point.value.sum)
        else:
            family.add_metric(values, point.value)
    return family


class _Collector:
    """Collects metrics for a registry of ``prometheus_client``."""

    def __init__(self, read: Callable[[], list[Metric]]) -> None:
        self._read = read

    def describe(self) -> list[Any]:
        """Returns nothing, so that a registry does not collect to learn the names."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yields the metrics as they are now."""
        yield from map(family_of, self._read())


class HttpServer(ThreadingMixIn, WSGIServer):
    """Listens at an address; serves each connection by a thread of its own, within limits.

    Args:
        address: The address to listen at; with port 0, a free one.

    Raises:
        OSError: It cannot listen there.
    """

    daemon_threads = True

    def __init__(self, address: Address) -> None:
        self._open_lock = threading.Lock()
        self._open: dict[Any, float] = {}  # The time at which each connection came; oldest first.
        super().__init__((address.host, address.port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener(address)
        # The method of the base class asks the name service for the name of the address.
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()

    def application_of(self, read: Callable[[], list[Metric]]) -> Any:
        """Returns the application that shows what a function returns."""
        registry = CollectorRegistry()
        collector: Any = _Collector(read)
        registry.register(collector)
        return make_wsgi_app(registry)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection by a thread of its own, within the limits for all of them."""
        with self._open_lock:
            excess = list(self._open)[: len(self._open) + 1 - _MOST_CONNECTIONS]
            for oldest in excess:
                self._hang_up(oldest)
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Closes connections that have lasted too long; called now and then."""
        with self._open_lock:
            late_s = time.monotonic() - _CONNECTION_S
            for each in [each for each, came_s in self._open.items() if came_s < late_s]:
                self._hang_up(each)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection that has been served."""
        with self._open_lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def hang_up_on_all(self) -> None:
        """Has the threads of all connections end."""
        with self._open_lock:
            for each in list(self._open):
                self._hang_up(each)

    def _hang_up(self, request: Any) -> None:
        del self._open[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a client that breaks off is no error of this worker."""


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_S
    """Seconds within which a client sends its request."""

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: each scrape would be a line on standard error."""
