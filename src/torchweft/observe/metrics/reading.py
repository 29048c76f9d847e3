"""Asks this worker, or all workers of its group, for their metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torchweft.arguments import wrong_type
from torchweft.errors import ConfigurationError
from torchweft.observe.group import Group
from torchweft.observe.metrics.measures import Metric, measures_of
from torchweft.observe.session import Access
from torchweft.protocol.observing.report import METRICS
from torchweft.rpc.node import Node, current_node

TIMEOUT_S = 2.0


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
    return reader_of(current_node(), group=group, timeout_s=timeout)()


def check(group: Any, timeout: Any) -> None:
    """Raises for arguments of ``read`` that make no sense."""
    if not isinstance(group, bool):
        raise wrong_type("group", group, "pass True for all workers, False for this one")
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool):
        raise wrong_type("timeout", timeout, "pass a number of seconds")
    if not 0 < timeout < math.inf:
        raise ConfigurationError(f"timeout is {timeout}; pass a positive number of seconds")


def reader_of(node: Node, *, group: bool, timeout_s: float) -> Callable[[], list[Metric]]:
    """Returns what reads the metrics of a worker, or of its group; its use blocks for the limit."""
    observers = node.observed.observers
    if not group:
        return lambda: measures_of([observers.report(METRICS)])
    access = Access(node.options.secret, node.options.tls)

    def read_all() -> list[Metric]:
        # Made anew: workers may have joined since the last time, or come back after a loss.
        found = Group([observers.identity()], access)
        answers = found.ask(timeout_s, METRICS)
        absent = [each for each in found.members if each.name in answers.silent]
        return measures_of(answers.reports, absent, found.name)

    return read_all
