"""Counts of elements that are not finite, and a stage that checks its results."""

from __future__ import annotations

import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweft.pipeline import BATCH, NotFinite, Wiring
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


def test_float8_without_infinities() -> None:
    found = not_finite([torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn)])
    assert found is not None
    assert found[:2] == (1, 0)


def test_only_tensors_of_numbers_that_may_be_bad_are_looked_at() -> None:
    assert not_finite([None, NAN, "nan", torch.ones(2, dtype=torch.int64), torch.ones(0)]) is None


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


def given(*values: float) -> dict[int, Packet]:
    return {0: Packet(1, None, [torch.tensor(values)])}


def test_a_stage_names_its_result_and_can_go_on() -> None:
    stage = middle_stage()
    with pytest.raises(NotFinite, match="worker 'b', forward of micro-batch 4: its output") as c:
        stage.forward(4, given(1.0, -1.0, -2.0))
    copied = pickle.loads(pickle.dumps(c.value))
    assert (copied.stage, copied.worker, copied.microbatch, copied.n_nan) == (1, "b", 4, 2)
    assert (copied.action, copied.value) == ("forward", "output for stage 2")
    stage.reset()
    stage.forward(5, given(0.0, 4.0))
    with pytest.raises(NotFinite, match="its gradient for stage 0 has 0 NaN and 1 infinite of 2"):
        stage.backward(5, {2: [torch.ones(2)]})
    stage.reset()
    stage.forward(6, given(1.0, 4.0))
    assert stage.backward(6, {2: [torch.ones(2)]})[0][0] is not None
    stage.check_weights()


def test_a_sender_is_blamed_for_an_infinity_that_spoils_a_result() -> None:
    packets = {0: Packet(0, None, [torch.tensor([INF, 1.0])])}
    with pytest.raises(NotFinite, match=r"stage 0 on worker 'a'.* with them, the output") as caught:
        middle_stage().forward(2, packets)
    assert (caught.value.stage, caught.value.n_infinite) == (0, 1)


def test_gradients_of_weights_are_checked_by_name() -> None:
    stage = middle_stage()
    stage.module.get_parameter("weight").grad = torch.tensor(NAN)
    with pytest.raises(NotFinite, match="update of micro-batch 7: its gradient of weight 'weight'"):
        stage.check_weights(7)


def test_the_batch_is_told_from_a_stage() -> None:
    args: tuple[Any, ...] = (0, Root(), Wiring.chain(2, spreads=False), None, lambda _: False)
    stage = CheckedStage(*args, unit="minibatch", worker="a", peer_of=peer_of)
    with pytest.raises(NotFinite, match="its input from the batch has 1 NaN"):
        stage.forward(0, {BATCH: Packet(0, None, [torch.tensor([NAN, 1.0])])})
