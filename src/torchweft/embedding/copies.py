"""Tables of which each trainer has a copy: ordinary parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft.embedding import initial
from torchweft.embedding.errors import PlanError
from torchweft.embedding.inputs import Flat
from torchweft.embedding.plan import Plan, TableConfig


def make_copy(config: TableConfig, seed: int) -> nn.Parameter:
    """Returns a table with its initial values, ``(rows, dim)``."""
    values = torch.empty(config.rows, config.dim, dtype=config.dtype, device="cpu")
    initial.fill(values, config, range(config.rows), range(config.dim), seed)
    return nn.Parameter(values)


def copies_of(plan: Plan, seed: int) -> nn.ParameterDict:
    """Returns the tables of which each trainer has a copy, by name."""
    copies = nn.ParameterDict()
    for config in plan.copied:
        if hasattr(copies, config.name):
            raise PlanError(
                f"a copy of a table is a parameter, and none can be named {config.name!r}; give "
                "the table another name",
                table=config.name,
            )
        copies[config.name] = make_copy(config, seed)
    return copies


def look_up_copy(weight: Tensor, config: TableConfig, flat: Flat) -> Tensor:
    """Returns the output of a table, on the device of its ids."""
    ids = flat.ids.to(weight.device)
    if flat.offsets is None:
        found = functional.embedding(ids, weight, config.padding_idx)
        found = found.view(*flat.shape, config.dim)
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
