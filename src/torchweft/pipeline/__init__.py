"""Pipeline parallelism: a model cut into stages, micro-batches on their way through them."""

from torchweft.pipeline.cutting import Stages, check_stages, cut_by_plan, cut_evenly, cut_sequential
from torchweft.pipeline.errors import CutError, NotFinite, StageMismatch
from torchweft.pipeline.optimizer import PipeOptimizer
from torchweft.pipeline.pipe import Pipe
from torchweft.pipeline.points import SplitPoint, cut_model
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
from torchweft.pipeline.step import broadcast
from torchweft.pipeline.wiring import BATCH, Take, Wiring

__all__ = [
    "BATCH",
    "CutError",
    "NotFinite",
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
    "SplitPoint",
    "StageMismatch",
    "Stages",
    "Table",
    "Take",
    "Wiring",
    "broadcast",
    "check_stages",
    "cut_by_plan",
    "cut_evenly",
    "cut_model",
    "cut_sequential",
]
