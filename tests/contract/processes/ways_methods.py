"""Rows of the table: methods of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.contract.processes.ways_autograd import gradients_of
from tests.contract.processes.ways_table import (
    WEIGHT,
    InContext,
    Section,
    Side,
    X,
    layer,
    leaf,
    square,
)
from torchweft import rpc

_tensors = Section("Methods of tensors")


@_tensors.same("`register_hook`, on what is sent, received, and on leaves")
def _(side: Side) -> Any:
    x, seen = leaf(), []
    sent = x * 2
    received = side.call(layer, sent)
    x.register_hook(lambda gradient: seen.append(gradient.clone()))
    sent.register_hook(lambda gradient: gradient * 3)
    received.register_hook(lambda gradient: gradient + 1)
    side.backward(received.pow(2).sum())
    return gradients_of(side, x), seen


@_tensors.same("`register_hook` in the remote function")
def _(side: Side) -> Any:
    x = leaf()
    side.backward(side.call(_hooked, x * 2).sum())
    return gradients_of(side, x)


def _hooked(x: Tensor) -> Tensor:
    hidden = layer(x)
    hidden.register_hook(lambda gradient: gradient * 5)
    return hidden.sin()


@_tensors.same("`retain_grad` of what is sent, and of what is computed from a result")
def _(side: Side) -> Any:
    x = leaf()
    sent = x * 2
    sent.retain_grad()
    hidden = side.call(layer, sent).sin()
    hidden.retain_grad()
    side.backward(hidden.pow(2).sum())
    return sent.grad, hidden.grad


@_tensors.same("`retain_grad` of a result")
def _(side: Side) -> Any:
    x = leaf()
    received = side.call(layer, x * 2)
    received.retain_grad()
    side.backward(received.pow(2).sum())
    return received.grad


@_tensors.same("`register_post_accumulate_grad_hook`, outside of contexts", ("outside",))
def _(side: Side) -> Any:
    x, seen = leaf(), []
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad))
    side.backward(side.call(layer, x * 2).sum())
    return seen


@_tensors.error(
    "`register_post_accumulate_grad_hook`, in a context", "would never be called", ("context",)
)
def _(side: Side) -> Any:
    x = leaf()
    x.register_post_accumulate_grad_hook(lambda leaf: None)
    side.backward(side.call(layer, x * 2).sum())


@_tensors.same("`requires_grad_`, of a result without a graph")
def _(side: Side) -> Any:
    received = side.call(torch.mul, X, 2).requires_grad_()
    side.backward(side.call(layer, received * 1).sum())
    return gradients_of(side, received)


@_tensors.same("`detach`, `detach_` and `data` of a result")
def _(side: Side) -> Any:
    x = leaf()
    first, second, third = (side.call(layer, x * factor) for factor in (2, 3, 5))
    side.backward((first.detach() * x + second.detach_() * x + third + third.data * x).sum())
    return gradients_of(side, x)


@_tensors.same("operations in place on a result")
def _(side: Side) -> Any:
    x = leaf()
    received = side.call(square, x * 2)
    received.mul_(2).add_(x)
    received[0] = 7
    side.backward(received.sin().sum())
    return received, side.gradient(x)


@_tensors.same("operations in place on a tensor after it was sent")
def _(side: Side) -> Any:
    x = leaf()
    sent = x * 2
    received = side.call(torch.mul, sent, 3)
    sent.mul_(x.detach())
    side.backward((received + sent).sum())
    return side.gradient(x)


@_tensors.same("operations in place on an argument, in the remote function")
def _(side: Side) -> Any:
    x = leaf()
    side.backward(side.call(_in_place, x * 2).sum())
    return gradients_of(side, x)


def _in_place(x: Tensor) -> Tensor:
    x.mul_(3)
    return layer(x)


@_tensors.own(
    "operations in place on an argument do not show at the caller, which has its own memory"
)
def _(side: Side) -> Any:
    x = X.clone()
    side.call(_in_place, x)
    assert torch.equal(x, X)


@_tensors.error(
    "an operation in place on a tensor that is saved for the pass here",
    "modified by an inplace operation",
)
def _(side: Side) -> Any:
    hidden = leaf().exp()
    loss = side.call(square, hidden * 1).sum()
    with torch.no_grad():
        hidden.add_(1)
    side.backward(loss)


@_tensors.same("`grad` in a context stays as it is; outside of contexts it adds up")
def _(side: Side) -> Any:
    x = leaf()
    for _ in range(2):
        side.backward(side.call(layer, x * 2).sum())
    assert (x.grad is None) == isinstance(side, InContext)
    return side.gradient(x)


@_tensors.same("views, and tensors that share memory, in one call")
def _(side: Side) -> Any:
    x = leaf()
    whole = x * 2
    side.backward(side.call(_parts, whole, whole[1:], whole.expand(2, 3)).sum())
    return side.gradient(x)


def _parts(whole: Tensor, part: Tensor, wide: Tensor) -> Tensor:
    return whole.sin().sum() * part.sum() + (wide * WEIGHT).cos().sum()


@_tensors.same("complex tensors, and views of them")
def _(side: Side) -> Any:
    x = leaf(torch.complex(X, X.flip(0)))
    side.backward(side.call(square, x.conj() * 2).abs().sum())
    return side.gradient(x)


@_tensors.same("sparse tensors: COO, CSR, CSC, and their second derivatives", ("context",))
def _(side: Side) -> Any:
    found = []
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        x = leaf(torch.tensor([[1.0, 0.0], [3.0, 4.0]]))
        dense = side.call(_to_dense, side.call(_to_sparse, x * 1, layout))
        (first,) = side.grad(dense.pow(2).sum() + x.pow(3).sum(), x, create_graph=True)
        found += [first, *side.grad(first.pow(2).sum(), x)]
    return found


def _to_sparse(x: Tensor, layout: torch.layout) -> Tensor:
    return x.to_sparse(layout=layout)


def _to_dense(x: Tensor) -> Tensor:
    return x.to_dense()


@_tensors.error("a gradient of a sparse tensor with elements where the tensor has none", "to_dense")
def _(side: Side) -> Any:
    x = leaf(torch.tensor([[1.0, 2.0], [0.0, 4.0]]))
    received = side.call(_to_sparse, x * 1, torch.sparse_coo)
    side.backward((received + received.t().coalesce()).to_dense().sin().sum())


@_tensors.same("sparse gradients of tensors that are sent")
def _(side: Side) -> Any:
    table = leaf(torch.eye(3))
    side.backward(side.call(_look_up, table * 2).sin().sum())
    return side.gradient(table)


@_tensors.differs("sparse gradients of a tensor that is sent and also used here")
def _(side: Side) -> Any:
    """The engine takes no sparse gradient where a pass waits for it."""
    table, seen = leaf(torch.eye(3)), []
    sent = table * 2
    sent.register_hook(lambda gradient: seen.append(gradient))
    side.backward((side.call(_look_up, sent) + _look_up(sent)).sin().sum())
    alone = leaf(torch.eye(3))
    own = alone * 2
    own.register_hook(lambda gradient: seen.append(gradient))
    torch.autograd.backward((_look_up(own) + _look_up(own)).sin().sum())
    assert [each.is_sparse for each in seen] == [False, True]
    torch.testing.assert_close(seen[0], seen[1].to_dense())
    gradient = side.gradient(table)
    assert gradient is not None
    torch.testing.assert_close(gradient, alone.grad.to_dense() if alone.grad is not None else None)


def _look_up(table: Tensor) -> Tensor:
    return torch.nn.functional.embedding(torch.tensor([0, 2, 2]), table, sparse=True)


@_tensors.same("nested tensors")
def _(side: Side) -> Any:
    x = leaf(torch.arange(8.0).reshape(4, 2))
    rows = torch.nested.nested_tensor_from_jagged(x * 2, torch.tensor([0, 1, 4]))
    side.backward(side.call(_rows_of, rows).sum())
    return side.gradient(x)


def _rows_of(rows: Any) -> Tensor:
    values: Tensor = rows.values()
    return values.sin()


@_tensors.same("`rpc_async` and futures, `rpc.remote` and references")
def _(side: Side) -> Any:
    x = leaf()
    if type(side).__name__ == "Alone":
        first, second = layer(x * 2), layer(x * 3)
    else:
        future = rpc.rpc_async("worker0", layer, (x * 2,))
        first = future.then(lambda done: done.value() * 1).wait()
        second = rpc.remote("worker0", layer, (x * 3,)).to_here()
    side.backward((first * second).sum())
    return gradients_of(side, x)
