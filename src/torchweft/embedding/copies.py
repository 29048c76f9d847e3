"""Tables of which each trainer has a copy: ordinary parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft.embedding import initial
from torchweft.embedding.inputs import Flat
from torchweft.embedding.plan import TableConfig


def make_copy(config: TableConfig, seed: int) -> nn.Parameter:
    """Returns a table with its initial values, ``(rows, dim)``."""
    values = torch.empty(config.rows, config.dim, dtype=config.dtype, device="cpu")
    initial.fill(values, config, range(config.rows), range(config.dim), seed)
    return nn.Parameter(values)


def look_up_copy(weight: Tensor, config: TableConfig, flat: Flat) -> Tensor:
    """Returns the output of a table, on the device of its ids."""
    ids = flat.ids.to(weight.device)
    if flat.offsets is None:
        found = functional.embedding(ids.view(flat.shape), weight, config.padding_idx)
    else:
        weights = None if flat.weights is None else flat.weights.to(weight.device)
        found = functional.embedding_bag(
            ids,
            weight,
            flat.offsets.to(weight.device),
            mode=config.pooling,
            per_sample_weights=weights,
        )
    return found.to(flat.device)
