"""Rows of the table: ``torch.autograd``, ``torch.autograd.graph`` and methods of tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, functional, graph
from torch.autograd.function import once_differentiable

from tests.processes.ways_table import (
    WEIGHT,
    InContext,
    Section,
    Side,
    X,
    apply,
    layer,
    leaf,
    refuse_all,
    square,
)
from torchweft import rpc

# torch.autograd

_autograd = Section("torch.autograd")


def gradients_of(side: Side, *leaves: Tensor) -> list[Tensor | None]:
    """Returns the gradients of leaves, and of the weight."""
    return [*map(side.gradient, leaves), side.weight_gradient()]


@_autograd.error(
    "`loss.backward()`, `torch.autograd.backward([loss])`", r"torchweft\.autograd\.backward"
)
def _(side: Side) -> Any:
    side.call(layer, leaf() * 2).sum().backward()


@_autograd.same("`torchweft.autograd.backward` in its place")
def _(side: Side) -> Any:
    x = leaf()
    side.backward(side.call(layer, x * 2).sum())
    return gradients_of(side, x)


@_autograd.same("several roots, and `grad_tensors`")
def _(side: Side) -> Any:
    x = leaf()
    first, second = side.call(layer, x * 2), side.call(layer, x.exp())
    side.backward([first, second.sum()], grad_tensors=[X, None])
    return gradients_of(side, x)


@_autograd.same("`retain_graph=True`, and a second pass")
def _(side: Side) -> Any:
    x = leaf()
    loss = side.call(layer, x * 2).sum()
    side.backward(loss, retain_graph=True)
    side.backward(loss)
    return gradients_of(side, x)


@_autograd.error("a second pass without `retain_graph`", "second time")
def _(side: Side) -> Any:
    loss = side.call(layer, leaf() * 2).pow(2).sum()
    side.backward(loss)
    side.backward(loss)


@_autograd.same("`create_graph=True`, in a context", ("context",))
def _(side: Side) -> Any:
    x = leaf()
    (first,) = side.grad(side.call(layer, x * 2).sum(), x, create_graph=True)
    (second,) = side.grad(first.pow(2).sum(), x, create_graph=True)
    (third,) = side.grad(second.sum(), x)
    return first, second, third


@_autograd.error("`create_graph=True` outside of contexts", "needs a context", ("outside",))
def _(side: Side) -> Any:
    side.backward(side.call(layer, leaf() * 2).sum(), create_graph=True)


@_autograd.error("`torch.autograd.grad(loss, x)` through a call", "would leave out a part")
def _(side: Side) -> Any:
    x = leaf()
    torch.autograd.grad(side.call(layer, x * 2).sum() + x.sum(), x)


@_autograd.error("`loss.backward(inputs=[x])` through a call", "would leave out a part")
def _(side: Side) -> Any:
    x = leaf()
    (side.call(layer, x * 2).sum() + x.sum()).backward(inputs=[x])


@_autograd.same("`torchweft.autograd.grad` in their place", ("context",))
def _(side: Side) -> Any:
    x, y = leaf(), leaf()
    return side.grad(side.call(layer, x * y).sum() + x.sum(), [x, y])


@_autograd.error(
    "`torchweft.autograd.grad` for calls that were made outside of contexts",
    "outside of autograd contexts",
    ("outside",),
)
def _(side: Side) -> Any:
    x = leaf()
    hidden = x * 2
    result = side.call(layer, hidden)
    side.grad(result.sum(), [hidden, result], allow_unused=True)


@_autograd.same("`grad` with `allow_unused`, and at tensors that are not leaves", ("context",))
def _(side: Side) -> Any:
    x, unused = leaf(), leaf()
    hidden = x * 2
    result = side.call(layer, hidden)
    return side.grad(result.sum(), [hidden, unused, result], allow_unused=True)


@_autograd.same("`torch.autograd.grad` of a part that is all here")
def _(side: Side) -> Any:
    x = leaf()
    result = side.call(layer, x * 2)
    return torch.autograd.grad(result.pow(2).sum(), result), torch.autograd.grad(x.sum(), x)


@_autograd.same("`torch.autograd.grad` of a part that is all in the remote function")
def _(side: Side) -> Any:
    x = leaf()
    side.backward(side.call(_inner_loop, x * 2))
    return gradients_of(side, x)


def _inner_loop(x: Tensor) -> Tensor:
    fast = WEIGHT * 1
    for _ in range(2):
        (gradient,) = torch.autograd.grad((fast * x).tanh().sum(), fast, create_graph=True)
        fast = fast - 0.1 * gradient
    return (fast * x).sum()


@_autograd.error(
    "`is_grads_batched=True` of `torchweft.autograd.grad`", "is_grads_batched", ("context",)
)
def _(side: Side) -> Any:
    x = leaf()
    side.grad(side.call(layer, x * 2), x, grad_outputs=torch.eye(3), is_grads_batched=True)


_FUNCTIONAL: dict[str, Callable[[Any, Tensor], Any]] = {
    "jacobian": functional.jacobian,
    "hessian": lambda f, x: functional.hessian(lambda it: f(it).sum(), x),
    "vjp": lambda f, x: functional.vjp(f, x, X),
    "jvp": lambda f, x: functional.jvp(f, x, X),
    "hvp": lambda f, x: functional.hvp(lambda it: f(it).sum(), x, X),
    "vhp": lambda f, x: functional.vhp(lambda it: f(it).sum(), x, X),
}


@_autograd.error(
    "`torch.autograd.functional`: `jacobian`, `hessian`, `vjp`, `jvp`, `hvp`, `vhp`",
    "all are refused",
)
def _(side: Side) -> Any:
    def run(it: Tensor) -> Tensor:
        made: Tensor = side.call(layer, it * 2) + it
        return made

    ways = [partial(way, run, leaf()) for way in _FUNCTIONAL.values()]
    refuse_all(ways, "would leave out", "torchweft.autograd")


@_autograd.same("the same in the remote function")
def _(side: Side) -> Any:
    return side.call(apply, _all_functional, X)


def _all_functional(x: Tensor) -> Any:
    weight = WEIGHT.detach()
    return [way(lambda it: (it * weight).tanh(), x) for way in _FUNCTIONAL.values()]


@_autograd.error("`forward_ad`: a dual tensor as an argument", "has a tangent")
def _(side: Side) -> Any:
    with forward_ad.dual_level():
        side.call(layer, forward_ad.make_dual(X, X))


@_autograd.same("`forward_ad` in the remote function")
def _(side: Side) -> Any:
    return side.call(_forward_mode, X)


def _forward_mode(x: Tensor) -> Any:
    with forward_ad.dual_level():
        made: Any = forward_ad.unpack_dual((forward_ad.make_dual(x, x) * WEIGHT.detach()).tanh())
        return made.primal, made.tangent


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradients[0]


class _OnceCube(_Cube):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Cube.backward(ctx, *gradients)


def _cube(x: Tensor) -> Tensor:
    made: Any = _Cube.apply(x)
    return made


def _once_cube(x: Tensor) -> Tensor:
    made: Any = _OnceCube.apply(x)
    return made


@_autograd.same(
    "`Function`, with `setup_context` and `once_differentiable`, here and in the remote function"
)
def _(side: Side) -> Any:
    x = leaf()
    side.backward((_once_cube(side.call(_cube, _cube(x))) + side.call(_once_cube, x * 2)).sum())
    return side.gradient(x)


@_autograd.error(
    "a second derivative of a `once_differentiable` function", "differentiate twice", ("context",)
)
def _(side: Side) -> Any:
    x = leaf()
    (first,) = side.grad(side.call(_once_cube, x * 2).pow(2).sum(), x, create_graph=True)
    side.backward(first.pow(2).sum())


class _AskedInBackward(torch.autograd.Function):
    """Its backward is computed where another function says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: Side) -> Tensor:
        ctx.side = side
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.side.call(torch.mul, gradients[0], 2), None


@_autograd.same("calls in the backward of a `Function`, and in hooks")
def _(side: Side) -> Any:
    x = leaf()
    made: Any = _AskedInBackward.apply(x, side)
    result = side.call(layer, made)
    result.register_hook(lambda gradient: side.call(torch.mul, gradient, 3))
    side.backward(result.sum())
    return gradients_of(side, x)


@_autograd.error("`gradcheck` and `gradgradcheck` of a function with a call", "would leave out")
def _(side: Side) -> Any:
    x = leaf(X.double())
    torch.autograd.gradcheck(lambda it: side.call(square, it * 2) + it, x)


@_autograd.same("`gradcheck` and `gradgradcheck` in the remote function")
def _(side: Side) -> Any:
    return side.call(_checked, X.double())


def _checked(x: Tensor) -> Any:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.gradcheck(_cube, x), torch.autograd.gradgradcheck(_cube, x)


@_autograd.same("`detect_anomaly` around the pass, for healthy functions")
def _(side: Side) -> Any:
    x = leaf()
    with torch.autograd.detect_anomaly():
        side.backward(side.call(layer, x * 2).sum())
    return gradients_of(side, x)


@_autograd.error("`detect_anomaly`, for a function here that returns NaN", "nan values")
def _(side: Side) -> Any:
    x = leaf(torch.tensor([0.0, 1.0, 2.0]))
    with torch.autograd.detect_anomaly():
        side.backward((side.call(square, x * 1).sqrt() * 0).sum())


@_autograd.own("`detect_anomaly`: the worker of a function checks if it is set there")
def _(side: Side) -> Any:
    with torch.autograd.detect_anomaly():
        assert not side.call(torch.is_anomaly_enabled)


@_autograd.same("`no_grad`, `set_grad_enabled(False)`: results do not require grad")
def _(side: Side) -> Any:
    x = leaf()
    kept = side.call(layer, x * 2)
    with torch.no_grad():
        constant = side.call(layer, x * 3)
        with torch.enable_grad():
            again = side.call(layer, x * 5)
    with torch.autograd.set_grad_enabled(False):
        other = side.call(layer, x * 7)
    side.backward((kept + constant + again + other).sum())
    assert [kept.requires_grad, again.requires_grad] == [True, True]
    assert [constant.requires_grad, other.requires_grad] == [False, False]
    return gradients_of(side, x)


@_autograd.own("`no_grad`: the remote function itself runs with gradients enabled")
def _(side: Side) -> Any:
    with torch.no_grad():
        assert side.call(torch.is_grad_enabled)


@_autograd.same("`inference_mode` around a call")
def _(side: Side) -> Any:
    x = leaf()
    with torch.inference_mode():
        result = side.call(layer, x * 2)
    return result.requires_grad, result + 0


@_autograd.same("`inference_mode` in the remote function")
def _(side: Side) -> Any:
    result = side.call(_infer, X)
    return result.requires_grad, result.tolist()


def _infer(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return layer(x)


@_autograd.same("`set_multithreading_enabled(False)`")
def _(side: Side) -> Any:
    x = leaf()
    with torch.autograd.set_multithreading_enabled(False):
        side.backward(side.call(layer, x * 2).sum())
    return gradients_of(side, x)


# torch.autograd.graph

_graph = Section("torch.autograd.graph")


@_graph.same("`saved_tensors_hooks`, for what is saved here")
def _(side: Side) -> Any:
    x, seen = leaf(), []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(1)
        return tensor * 1

    def unpack(tensor: Tensor) -> Tensor:
        seen.append(2)
        return tensor

    with graph.saved_tensors_hooks(pack, unpack):
        hidden = x.exp()
        result = hidden * 2
    side.backward(side.call(square, result).sum())
    return side.gradient(x), seen


@_graph.same("`saved_tensors_hooks` in the remote function")
def _(side: Side) -> Any:
    x = leaf()
    side.backward(side.call(_on_cpu, x * 2).sum())
    return gradients_of(side, x)


def _on_cpu(x: Tensor) -> Tensor:
    with graph.save_on_cpu():
        return layer(x).exp()


@_graph.same("`save_on_cpu` around calls")
def _(side: Side) -> Any:
    x = leaf()
    with graph.save_on_cpu():
        result = side.call(layer, x.exp()).sin()
    side.backward(result.sum())
    return gradients_of(side, x)


@_graph.same("`disable_saved_tensors_hooks`")
def _(side: Side) -> Any:
    x = leaf()
    with graph.disable_saved_tensors_hooks("not here"):
        side.backward(side.call(layer, x * 2).sum())
    return gradients_of(side, x)


@_graph.same("`register_multi_grad_hook`, over tensors before a call, or after it")
def _(side: Side) -> Any:
    x, seen, any_seen = leaf(), [], []
    sent = [x * 2, x.exp()]
    received = side.call(layer, sent[0] * sent[1])
    after = [received * 1, received.sin()]
    for tensors in (sent, after):
        graph.register_multi_grad_hook(tensors, lambda found: seen.append(list(found)))
        graph.register_multi_grad_hook(tensors, any_seen.append, mode="any")
    side.backward((after[0] * after[1]).sum())
    return gradients_of(side, x), seen, len(any_seen)


@_graph.differs("`register_multi_grad_hook`, over tensors on both sides of a call")
def _(side: Side) -> Any:
    seen: list[Any] = []
    sent = leaf() * 2
    received = side.call(layer, sent)
    graph.register_multi_grad_hook([sent, received], lambda found: seen.append(list(found)))
    side.backward(received.sum())
    assert [[each is None for each in found] for found in seen] == [[True, False]]


@_graph.error("`register_multi_grad_hook`, over leaves", "A leaf node was passed", ("context",))
def _(side: Side) -> Any:
    x = leaf()
    graph.register_multi_grad_hook([x], lambda found: None)
    side.backward(side.call(layer, x * 2).sum())


@_graph.differs("hooks of the node of a result are not called; hooks of the tensor are")
def _(side: Side) -> Any:
    seen: list[Any] = []
    received = side.call(layer, leaf() * 2)
    received.grad_fn.register_hook(lambda *_: seen.append("node"))
    received.register_hook(lambda _: seen.append("tensor"))
    side.backward(received.sum())
    assert seen == ["tensor"]


@_graph.differs("hooks of the node that accumulates a leaf's gradient are not called")
def _(side: Side) -> Any:
    x, seen = leaf(), []
    node = graph.get_gradient_edge(x).node
    node.register_hook(lambda *_: seen.append("node"))
    x.register_hook(lambda _: seen.append("tensor"))
    side.backward(side.call(layer, x * 2).sum())
    assert seen == ["tensor"]


@_graph.same("`allow_mutation_on_saved_tensors`")
def _(side: Side) -> Any:
    x = leaf()
    with graph.allow_mutation_on_saved_tensors():
        hidden = x.exp()
        result = side.call(square, hidden.sin())
        with torch.no_grad():
            hidden.zero_()
        side.backward(result.sum())
    return side.gradient(x)


@_graph.error("a `GradientEdge` as a root or an input", "not a tensor", ("context",))
def _(side: Side) -> Any:
    x = leaf()
    side.backward([graph.get_gradient_edge(side.call(layer, x * 2).sum())])


@_graph.same("hooks of nodes: `grad_fn.register_hook`, `register_prehook`")
def _(side: Side) -> Any:
    x, seen = leaf(), []
    hidden = x.exp()
    result = side.call(layer, hidden).sin()
    for tensor in (hidden, result):
        assert tensor.grad_fn is not None
        tensor.grad_fn.register_hook(lambda after, before: seen.append((after, before)))
        tensor.grad_fn.register_prehook(lambda before: seen.append(before))
    side.backward(result.sum())
    return gradients_of(side, x), seen


@_graph.same("`increment_version`: a tensor that was saved here may not be used")
def _(side: Side) -> Any:
    x = leaf()
    hidden = x.exp()
    loss = side.call(square, hidden * 1).sum()
    graph.increment_version(hidden)
    try:
        side.backward(loss)
    except Exception as error:
        return "modified by an inplace operation" in str(error)
    return False


# Tensors

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
