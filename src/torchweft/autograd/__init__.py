"""Distributed autograd: records messages, and runs backward passes through all workers."""

from torchweft.autograd.api import (
    backward,
    context,
    current_context_id,
    get_gradients,
    grad,
    is_available,
)

__all__ = [
    "backward",
    "context",
    "current_context_id",
    "get_gradients",
    "grad",
    "is_available",
]
