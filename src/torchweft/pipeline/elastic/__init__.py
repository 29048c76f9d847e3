"""Pipelines that change their form while they train: layers freeze, workers are lost."""

from torchweft.pipeline.elastic.freezing import FreezeAt, FreezeByNorm, FreezeFraction, Freezing
from torchweft.pipeline.elastic.pipe import ElasticPipe, Shape, Usage
from torchweft.pipeline.elastic.samples import Samples

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
