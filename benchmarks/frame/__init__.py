"""The framework of all benchmarks; ``README.md`` beside this file says how to write a question.

No module here imports torch before a worker process has been pinned to its cores.
"""

from __future__ import annotations

from benchmarks.frame.question import COMPAT, RAW, TORCH, WEFT, Form, Question, Row, Side
from benchmarks.frame.run import main
from benchmarks.frame.targets import (
    Target,
    at_least_of_limit,
    at_most,
    at_most_times_limit,
    no_more_cpu,
    no_slower,
    times_faster,
)
from benchmarks.frame.units import (
    COUNT,
    GIGABYTES_PER_S,
    MEGABYTES,
    MICROSECONDS,
    MILLISECONDS,
    PERCENT,
    SECONDS,
    STEPS_PER_S,
    Unit,
)
from benchmarks.frame.work import Numbers, Work

__all__ = [
    "COMPAT",
    "COUNT",
    "GIGABYTES_PER_S",
    "MEGABYTES",
    "MICROSECONDS",
    "MILLISECONDS",
    "PERCENT",
    "RAW",
    "SECONDS",
    "STEPS_PER_S",
    "TORCH",
    "WEFT",
    "Form",
    "Numbers",
    "Question",
    "Row",
    "Side",
    "Target",
    "Unit",
    "Work",
    "at_least_of_limit",
    "at_most",
    "at_most_times_limit",
    "main",
    "no_more_cpu",
    "no_slower",
    "times_faster",
]
