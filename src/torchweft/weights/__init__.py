"""Weights by version: a trainer publishes, and samplers take over the newest when it suits them."""

from torchweft.weights.errors import DeltaError, WeightsMismatch
from torchweft.weights.inbox import announce
from torchweft.weights.publisher import Published, Publisher
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
