"""The counters of workers for other monitoring: served for Prometheus, or as plain data.

The numbers are those of ``torchweft top``: the reports of workers, asked when they are wanted, so
nothing is counted twice. ``measures`` names them as OpenTelemetry does, and only ``prometheus``
imports a package that not everybody has.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from torchweft import scraping
from torchweft.arguments import checked_int, wrong_type
from torchweft.closing import Closing
from torchweft.errors import ConfigurationError
from torchweft.extending import credentials, on_leave, own_report, this_worker
from torchweft.observe.group import Group
from torchweft.observe.measures import Distribution, Metric, Point, measures_of
from torchweft.observe.session import Access
from torchweft.reports import METRICS
from torchweft.scraping import Address

__all__ = ["Distribution", "Metric", "Point", "Server", "read", "serve"]

_LOOPBACK = "127.0.0.1"
_MOST_PORTS = 1 << 16
TIMEOUT_S = 2.0
_POLL_S = 0.1


def read(*, group: bool = False, timeout: float = TIMEOUT_S) -> list[Metric]:
    """Returns the metrics of this worker, or of its group, as plain data.

    Calls of functions are counted from the first time on, and until ten minutes after the last
    one; ``WEFT_COUNTERS=1`` counts from the beginning. Thread-safe.

    Args:
        group: Whether to ask all workers of the group. They are asked as ``torchweft top`` does:
            no message of the group goes to them, and a worker that is stuck answers.
        timeout: Seconds to wait at most for each of them.

    Raises:
        NotInitialized: This process is no worker.
        ConfigurationError: ``timeout`` is not positive.
    """
    check(group, timeout)
    return reader_of(group=group, timeout_s=timeout)()


def check(group: Any, timeout: Any) -> None:
    """Raises for arguments of ``read`` that make no sense."""
    if not isinstance(group, bool):
        raise wrong_type("group", group, "pass True for all workers, False for this one")
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool):
        raise wrong_type("timeout", timeout, "pass a number of seconds")
    if not 0 < timeout < math.inf:
        raise ConfigurationError(f"timeout is {timeout}; pass a positive number of seconds")


def reader_of(*, group: bool, timeout_s: float) -> Callable[[], list[Metric]]:
    """Returns what reads the metrics of this worker, or of its group; blocks for the limit.

    Raises:
        NotInitialized: This process is no worker.
    """
    access = Access(*credentials())

    def read_all() -> list[Metric]:
        own = own_report(METRICS)
        if not group:
            return measures_of([own])
        # Made anew: workers may have joined since the last time, or come back after a loss.
        found = Group([own.identity], access)
        answers = found.ask(timeout_s, METRICS)
        absent = [each for each in found.members if each.name in answers.silent]
        return measures_of(answers.reports, absent, found.name)

    return read_all


def serve(
    port: int = 0, *, host: str = _LOOPBACK, group: bool = False, timeout: float = TIMEOUT_S
) -> Server:
    """Serves the metrics of this worker, or of its group, for Prometheus.

    They are read when they are asked for: see ``read``. The endpoint ends when it is closed, and
    with the worker. It needs the extra ``metrics``. Does not block.

    Args:
        port: The port; 0 for a free one.
        host: The address to listen at. Whoever reaches it reads names of functions and workers,
            and numbers; the connection is not encrypted.
        group: Whether to serve the metrics of all workers of the group.
        timeout: Seconds to wait at most for each worker of the group.

    Raises:
        ConfigurationError: The extra is missing, or the address cannot be listened at.
        NotInitialized: This process is no worker.
    """
    if not isinstance(host, str):
        raise wrong_type("host", host, "pass an address, such as '127.0.0.1'")
    if not 0 <= checked_int("port", port) < _MOST_PORTS:
        raise ConfigurationError(f"port is {port}; pass a number up to 65535, or 0 for a free one")
    check(group, timeout)
    scraping.check_package()
    this_worker()  # Raises before a port is taken.
    server = Server(Address(host, port), "pass another port, or 0 for a free one")
    return server.serve(group=group, timeout_s=timeout)


class Server(Closing):
    """Serves the metrics of a worker at an address; also a context manager, which closes it.

    It listens at once, before the worker joins. Requests wait until ``serve`` is called.
    Thread-safe.

    Args:
        address: The address to listen at; with port 0, a free one.
        fix: What to do if it is taken, for the error.

    Raises:
        ConfigurationError: The extra is missing, or the address cannot be listened at.

    Attributes:
        url: Its address, for Prometheus.
        port: Its port.
    """

    def __init__(self, address: Address, fix: str = "take another port") -> None:
        try:
            from torchweft.observe.prometheus import HttpServer
        except ImportError as error:
            raise scraping.missing(error.name) from error
        try:
            self._http = HttpServer(address)
        except OSError as error:
            raise scraping.taken(address, error, fix) from error
        self.port: int = self._http.server_port
        self.url = address._replace(port=self.port).url
        self._forget: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def serve(self, *, group: bool = False, timeout_s: float = TIMEOUT_S) -> Server:
        """Begins to serve the metrics of this worker, or of its group, until the worker leaves."""
        try:
            read = reader_of(group=group, timeout_s=timeout_s)
            read()  # Calls are counted from now on.
            self.begin(read, f"weft-{this_worker().name}-metrics")
            self._forget = on_leave(self.close)
        except BaseException:
            self.close()
            raise
        return self

    def begin(self, read: Callable[[], list[Metric]], name: str) -> None:
        """Begins to serve what a function returns, by a thread of that name."""
        self._http.set_app(self._http.application_of(read))
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(_POLL_S,), name=name, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends it; nothing if it has ended. Blocks for half a second at most."""
        self._forget()
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._http.shutdown()
                thread.join()
            self._http.server_close()
            self._http.hang_up_on_all()

    def __repr__(self) -> str:
        return f"<metrics at {self.url}>"
