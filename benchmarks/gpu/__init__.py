"""Tensors and gradients between two processes that use the same GPU."""
