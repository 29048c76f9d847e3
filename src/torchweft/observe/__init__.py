"""Shows what the workers of a running group do.

From outside of the group: ``session`` asks one worker, ``group`` finds the workers of a group and
asks all of them, ``text`` and ``live`` show the answers, and ``files`` reads the reports that
workers have written. Nothing of that imports torch, so that the command line answers at once. From
a worker: ``trace`` records what all workers do, ``metrics`` has the counters for other monitoring,
``spans`` tells OpenTelemetry of each call, and ``doctor`` examines their hosts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchweft.errors import ConfigurationError

if TYPE_CHECKING:
    from torchweft.observe import metrics
    from torchweft.observe.telemetry import Spans as spans
    from torchweft.observe.tracing.session import Trace as trace

__all__ = ["metrics", "spans", "trace"]

# Loaded when first used: they need torch.
_PLACES = {
    "metrics": ("metrics", ""),
    "spans": ("telemetry", "Spans"),
    "trace": ("tracing.session", "Trace"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'torchweft.observe' has no attribute {name!r}")
    place, kind = _PLACES[name]
    try:
        module = importlib.import_module(f"torchweft.observe.{place}")
    except ImportError as error:
        raise ConfigurationError(
            f"there are no {name} without the package {error.name!r}: "
            "pip install 'torchweft[otel]', and an SDK with an exporter"
        ) from error
    return getattr(module, kind) if kind else module
