"""Copies the tensors that a worker sends to itself, as if another worker had received them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter


def own_copy(tensor: Tensor, context_id: int, keeps_graphs: bool = False) -> Tensor:
    """Returns a copy of a tensor; in an autograd context (not 0) the copy stays in the graph.

    Outside of contexts, the copy of a leaf is a new leaf. The copy of a computed tensor stays in
    the graph if ``keeps_graphs``.
    """
    if tensor.requires_grad and (context_id or (keeps_graphs and not tensor.is_leaf)):
        with torch.enable_grad():
            copy = tensor.clone()
        if isinstance(tensor, Parameter):
            copy._is_param = True  # for isinstance
        return copy
    copy = tensor.detach().clone()
    if isinstance(tensor, Parameter):
        return Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)
