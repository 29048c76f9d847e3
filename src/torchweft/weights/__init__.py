"""Weights by version: a trainer publishes, and samplers take over the newest when it suits them."""

from torchweft.weights.errors import DeltaError, WeightsMismatch
from torchweft.weights.publisher import Published, Publisher
from torchweft.weights.subscriber import Subscriber, Taken

__all__ = [
    "DeltaError",
    "Published",
    "Publisher",
    "Subscriber",
    "Taken",
    "WeightsMismatch",
]
