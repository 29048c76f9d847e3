"""Shows what the workers of a running group do.

From outside of the group: ``session`` asks one worker, ``group`` finds the workers of a group and
asks all of them, ``text`` and ``live`` show the answers, and ``files`` reads the reports that
workers have written. Nothing of that imports torch, so that the command line answers at once. From
a worker: ``trace`` records what all workers do, and ``doctor`` examines their hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchweft.observe.tracing.session import Trace as trace

__all__ = ["trace"]


def __getattr__(name: str) -> Any:
    if name == "trace":  # Loaded when first used: it needs torch.
        from torchweft.observe.tracing.session import Trace

        return Trace
    raise AttributeError(f"module 'torchweft.observe' has no attribute {name!r}")
