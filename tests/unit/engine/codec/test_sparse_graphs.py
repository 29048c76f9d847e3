"""Sparse tensors that are taken apart and made anew, in graphs of any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchweft.engine.codec.reducers import reduce_tensor
from torchweft.errors import AutogradError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")

X = torch.tensor(
    [[1.0, 2.0, 0.0, 4.0], [3.0, 0.0, 5.0, 6.0], [1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 0.0, 0.0]]
)
LAYOUTS: dict[torch.layout, dict[str, Any]] = {
    torch.sparse_coo: {},
    torch.sparse_csr: {},
    torch.sparse_csc: {},
    torch.sparse_bsr: {"blocksize": (2, 2)},
    torch.sparse_bsc: {"blocksize": (2, 2)},
}
Step = Callable[[Tensor], Tensor]


def anew(tensor: Tensor) -> Tensor:
    rebuild, arguments = reduce_tensor(tensor)
    made: Tensor = rebuild(*arguments)
    return made


def same(tensor: Tensor) -> Tensor:
    return tensor


def orders(make: Step, trip: Step, use: Step) -> list[Tensor]:
    x = X.clone().requires_grad_()
    value = use(trip(make(x))).pow(2).sum() + x.pow(3).sum()
    found = []
    for order in (1, 2, 3):
        try:
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        except RuntimeError as error:  # PyTorch lacks the derivatives of some operations.
            if order == 1 or "not implemented" not in str(error):
                raise
            break
        found.append(gradient.detach())
        value = gradient.pow(2).sum()
    return found


def assert_same(make: Step, use: Step) -> None:
    wanted = orders(make, same, use)
    torch.testing.assert_close(orders(make, anew, use)[: len(wanted)], wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_derivatives_of_every_order(layout: torch.layout) -> None:
    def make(x: Tensor) -> Tensor:
        return (x * x).to_sparse(layout=layout, **LAYOUTS[layout])

    assert_same(make, Tensor.to_dense)
    assert_same(make, lambda it: it.to_dense().sin())


@pytest.mark.parametrize("create_graph", [False, True])
def test_elements_that_the_tensor_does_not_have_are_no_silent_loss(create_graph: bool) -> None:
    x = X.clone().requires_grad_()
    made = anew(x.to_sparse())
    wide = (made + made.t().coalesce()).to_dense().sin().sum()
    with pytest.raises(AutogradError, match=r"send the tensor as tensor\.to_dense"):
        torch.autograd.grad(wide, x, create_graph=create_graph)
