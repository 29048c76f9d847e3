"""Starts a side, prints its process ids, and exits without telling the processes."""

from __future__ import annotations

import os

from benchmarks.frame.group import started_group
from benchmarks.frame.placement import placements
from tests.tools.benchmarks.example.question import ECHO, QUESTION

with started_group(QUESTION, ECHO, placements()["not pinned"]) as group:
    print(*group.pids, flush=True)
    os._exit(0)
