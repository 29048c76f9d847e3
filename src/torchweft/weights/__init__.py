"""Weights by version: a trainer publishes, and samplers take over the newest when it suits them."""

from torchweft.weights.delta import DeltaError
from torchweft.weights.layout import WeightsMismatch
from torchweft.weights.publisher import Published, Publisher, announce
from torchweft.weights.subscriber import Subscriber, Taken

CALLABLES = (announce, WeightsMismatch)
"""The callables that a strict worker names in ``RpcBackendOptions(callables=...)`` to follow a
publisher."""

__all__ = [
    "CALLABLES",
    "DeltaError",
    "Published",
    "Publisher",
    "Subscriber",
    "Taken",
    "WeightsMismatch",
]
