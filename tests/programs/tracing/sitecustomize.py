"""Has each cluster of a program traced, for tests that run programs as they are.

This folder is put in front of ``PYTHONPATH``. The variable ``TRACED`` names the file of the trace;
what the counters have counted meanwhile is written beside it, as ``TRACED.counts``.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

from torchweft.launch.local_cluster import Cluster

_SERVICE = "torchweft.rpc.tracing.service."
_LIMIT = 1_000_000

_start, _close = Cluster.start, Cluster.close
_traces: dict[int, tuple[Any, dict[str, Counter[str]]]] = {}


def counted() -> dict[str, int]:
    """Returns the calls of this worker, by direction and function."""
    from torchweft.rpc.node import current_node

    counts: Counter[str] = Counter()
    for each in current_node().counting.counts():
        if not each.function.startswith((_SERVICE, f"{__name__}.")):
            counts[f"{each.direction} {each.function}"] += each.calls
    return dict(counts)


def count_all() -> dict[str, Counter[str]]:
    from torchweft import rpc

    infos = rpc.get_worker_infos()
    return {info.name: Counter(rpc.rpc_sync(info, counted)) for info in infos}


def start(self: Cluster) -> Cluster:
    result = _start(self)
    from torchweft.observe.tracing.session import Trace

    before = count_all()
    trace = Trace(os.environ["TRACED"], limit=_LIMIT)
    trace.__enter__()
    _traces[id(self)] = trace, before
    return result


def close(self: Cluster) -> None:
    trace, before = _traces.pop(id(self), (None, {}))
    if trace is not None:
        trace.__exit__(None, None, None)
        counts = {name: dict(found - before[name]) for name, found in count_all().items()}
        with open(os.environ["TRACED"] + ".counts", "w") as file:
            json.dump(counts, file)
    _close(self)


if "TRACED" in os.environ:
    Cluster.start, Cluster.close = start, close  # type: ignore[method-assign]
