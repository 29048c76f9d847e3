"""Distributed autograd: recording what is sent, and backward through all workers."""

from weft.autograd.api import backward, context, get_gradients

__all__ = ["backward", "context", "get_gradients"]
