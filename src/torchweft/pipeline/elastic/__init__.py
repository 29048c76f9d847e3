"""Pipelines that change their form while they train: layers freeze, workers are lost."""

from torchweft.pipeline.elastic.epochs import (
    FreezeAt,
    FreezeByNorm,
    FreezeFraction,
    Freezing,
    Samples,
)
from torchweft.pipeline.elastic.pipe import ElasticPipe, Shape, Usage

__all__ = [
    "ElasticPipe",
    "FreezeAt",
    "FreezeByNorm",
    "FreezeFraction",
    "Freezing",
    "Samples",
    "Shape",
    "Usage",
]
