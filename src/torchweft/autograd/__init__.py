"""Distributed autograd: recording what is sent, and backward through all workers."""

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
