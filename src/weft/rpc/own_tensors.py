"""Copies of the tensors that a worker sends to itself, as if another had received them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter


def own_copy(tensor: Tensor, context_id: int) -> Tensor:
    """Returns a copy: in an autograd context (not 0) it stays in the graph, else it is a leaf."""
    if context_id and tensor.requires_grad:
        with torch.enable_grad():
            copy = tensor.clone()
        if isinstance(tensor, Parameter):
            copy._is_param = True  # for isinstance
        return copy
    copy = tensor.detach().clone()
    if isinstance(tensor, Parameter):
        return Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)
