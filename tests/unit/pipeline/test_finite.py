"""Counts of elements that are not finite, and a stage that checks its results."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweft.pipeline import NotFinite, Wiring
from torchweft.pipeline.finite import CheckedStage, not_finite
from torchweft.pipeline.wiring import Packet

NAN, INF = math.nan, math.inf


DTYPES = ["float32", "float64", "bfloat16", "float16", "complex64", "float8_e5m2"]


@pytest.mark.parametrize("name", DTYPES)
def test_elements_are_counted_in_every_dtype(name: str) -> None:
    dtype = getattr(torch, name)
    tensor = torch.tensor([1.0, NAN, -INF, INF, 0.0]).to(dtype)
    found = not_finite([torch.ones(3).to(dtype), tensor])
    assert found is not None
    assert found[:2] == (1, 2)
    assert found.tensor is tensor
    assert str(found).startswith("1 NaN and 2 infinite of 5 elements (")


def test_gradients_of_an_embedding_may_be_sparse() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    (table(torch.tensor([1, 3])) * torch.tensor([[1.0, NAN], [1.0, 1.0]])).sum().backward()
    found = not_finite([table.weight.grad])
    assert found is not None
    assert found[:2] == (1, 0)


def test_an_infinity_may_be_let_through_but_no_nan() -> None:
    masks = [torch.tensor([0.0, -INF]), torch.tensor([0.0, -INF])]
    assert not_finite(masks, strict=0b00) is None
    found = not_finite(masks, strict=0b10)
    assert found is not None
    assert found.tensor is masks[1]
    assert not_finite([torch.tensor([NAN, INF])], strict=0) is not None


class Root(nn.Module):
    """A stage whose output is NaN for negative inputs, and its gradient infinite for zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * inputs.sqrt()


def middle_stage() -> CheckedStage:
    """Returns the middle one of three stages."""
    args: tuple[Any, ...] = (1, Root(), Wiring.chain(3, spreads=False), None, lambda _: False)
    return CheckedStage(*args, unit="micro-batch", worker="b", peer_of=peer_of)


def peer_of(stage: int, microbatch: int) -> Any:
    return SimpleNamespace(name="abc"[stage])


def test_a_sender_is_blamed_for_an_infinity_that_spoils_a_result() -> None:
    packets = {0: Packet(0, None, [torch.tensor([INF, 1.0])])}
    with pytest.raises(NotFinite, match=r"stage 0 on worker 'a'.* with them, the output") as caught:
        middle_stage().forward(2, packets)
    assert (caught.value.stage, caught.value.n_infinite) == (0, 1)
