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

if TYPE_CHECKING:
    from torchweft.observe import metrics
    from torchweft.observe.telemetry.spans import Spans as spans
    from torchweft.observe.tracing.session import Trace as trace

__all__ = ["metrics", "spans", "trace"]

# Loaded when first used: they need torch.
_CLASSES = {
    "trace": ("torchweft.observe.tracing.session", "Trace"),
    "spans": ("torchweft.observe.telemetry.spans", "Spans"),
}


def __getattr__(name: str) -> Any:
    if name == "metrics":
        return importlib.import_module("torchweft.observe.metrics")
    if name in _CLASSES:
        module, kind = _CLASSES[name]
        return getattr(importlib.import_module(module), kind)
    raise AttributeError(f"module 'torchweft.observe' has no attribute {name!r}")
