"""Pipeline parallelism: a model cut into stages, micro-batches on their way through them."""

from torchweft.pipeline.cutting import Stages, cut_evenly, cut_sequential
from torchweft.pipeline.pipe import Pipe, PipeOptimizer
from torchweft.pipeline.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleNaive,
    SchedulePipeDream,
    ScheduleZBH1,
    ScheduleZBVZeroBubble,
    Table,
)
from torchweft.pipeline.wiring import BATCH, Take, Wiring

__all__ = [
    "BATCH",
    "Pipe",
    "PipeOptimizer",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleNaive",
    "SchedulePipeDream",
    "ScheduleZBH1",
    "ScheduleZBVZeroBubble",
    "Stages",
    "Table",
    "Take",
    "Wiring",
    "cut_evenly",
    "cut_sequential",
]
