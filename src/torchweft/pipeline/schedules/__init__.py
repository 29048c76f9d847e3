"""Schedules of a pipeline: which worker runs which stage for which micro-batch, in which order.

A schedule is a small frozen object whose ``table(n_workers)`` is a ``Table``: plain data, which
workers run and which this package can check, predict and show. A table may also come from a CSV
text. The package is pure: it knows no tensor, no worker, no clock.

In docstrings ``p`` is the number of workers, ``m`` that of micro-batches, and ``v`` that of stages
for each worker. The sources: GPipe (Huang et al. 2019), PipeDream (Narayanan et al. 2019), 2BW and
interleaved 1F1B (Narayanan et al. 2021), breadth first (Lamy-Poirier 2022), zero bubble (Qi et al.
2023 and 2024), DualPipe (DeepSeek-V3 2024). The names are those of torch.distributed.pipelining
where it has one.
"""

from torchweft.pipeline.errors import CellError, ScheduleError, TableError
from torchweft.pipeline.schedules.pipedream import SchedulePipeDream, Versions, versions_of
from torchweft.pipeline.schedules.synchronous import (
    Placement,
    Schedule,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleNaive,
    ScheduleZBH1,
    ScheduleZBVZeroBubble,
)
from torchweft.pipeline.schedules.table import Action, Kind, Span, Table, Weights, check
from torchweft.pipeline.schedules.timeline import Costs, Timeline, predict

__all__ = [
    "Action",
    "Kind",
    "Table",
    "Weights",
    "Schedule",
    "Placement",
    "ScheduleNaive",
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleZBH1",
    "ScheduleLoopedBFS",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
    "SchedulePipeDream",
    "check",
    "predict",
    "Costs",
    "Span",
    "Timeline",
    "versions_of",
    "Versions",
    "CellError",
    "ScheduleError",
    "TableError",
]
