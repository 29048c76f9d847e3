"""Functions for workers in the tests of the progress display."""

from __future__ import annotations

import threading

from torchweft import rpc


def never_on(worker: str | None) -> str:
    """Returns this worker's name; on ``worker`` it blocks for longer than a test."""
    name = rpc.get_worker_info().name
    if name == worker:
        threading.Event().wait(60)
    return name
