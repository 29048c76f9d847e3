"""Distributed autograd: recording what is sent, and backward through all workers."""

from weft.autograd.api import backward, context, current_context_id, get_gradients, grad

__all__ = ["backward", "context", "current_context_id", "get_gradients", "grad"]
