from __future__ import annotations

import pytest
import torch

from torchweft.embedding import Adagrad, IdOutOfRange, TableConfig, plan_tables
from torchweft.embedding.shard import Gradients, Shard


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_steps_with_more_rows_than_are_changed_at_a_time(share: float) -> None:
    rows, dim, lr = 5000, 64, 0.1
    plan = plan_tables([TableConfig("words", rows, dim, dtype=torch.float64)], ["server"])
    shard = Shard(plan.layout.stacks[0], 0, seed=1)
    shard.set_rule(Adagrad(lr=lr))
    expected = torch.nn.Parameter(shard.weights.clone())
    optimizer = torch.optim.Adagrad([expected], lr=lr)
    generator = torch.Generator().manual_seed(0)
    changed = torch.zeros(rows, dtype=torch.int64)
    for version in (1, 2, 7):
        touched = torch.randperm(rows, generator=generator)[: int(share * rows)].sort().values
        gradients = torch.randn(len(touched), dim, dtype=torch.float64, generator=generator)
        shard.apply([Gradients(1, [(touched, gradients)])], lr, 1, version)
        expected.grad = torch.zeros_like(expected).index_copy(0, touched, gradients)
        optimizer.step()
        changed[touched] = version
        assert torch.equal(shard.changed, changed)
    assert torch.allclose(shard.weights, expected.detach(), rtol=0, atol=1e-12)
    some = torch.tensor([4999, 0], dtype=torch.int32)
    assert torch.equal(shard.changed_since(some, 2), changed[[4999, 0]] > 2)
    with pytest.raises(IdOutOfRange, match="row 5000"):
        shard.changed_since(torch.tensor([5000]), 2)
