"""Rows of the table: ``torch.autograd`` and ``torch.autograd.graph``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, functional, graph
from torch.autograd.function import once_differentiable

from tests.contract.processes.ways_table import (
    WEIGHT,
    Section,
    Side,
    X,
    apply,
    layer,
    leaf,
    refuse_all,
    square,
)

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
    sparse = _Sparse.apply(x)  # type: ignore[no-untyped-call]
    (of_sparse,) = torch.autograd.grad(sparse, x, sparse.detach())
    inside = torch.autograd.grad(result.pow(2).sum(), result), torch.autograd.grad(x.sum(), x)
    return inside, of_sparse


class _Sparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to_sparse()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].to_dense()


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


def layer_with_hooked_weight(x: Tensor) -> Tensor:
    made = x * WEIGHT
    assert made.grad_fn is not None
    accumulating = made.grad_fn.next_functions[1][0]
    assert accumulating is not None
    handle = accumulating.register_prehook(lambda found: (handle.remove(), found[0] * 7)[1:])
    return torch.tanh(made)


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


@_graph.same("`register_multi_grad_hook`, over tensors on both sides of a call, and over leaves")
def _(side: Side) -> Any:
    x, y, seen, any_seen = leaf(), leaf(), [], []
    sent, other = x * 2, y * 3
    received, apart = side.call(layer, sent), side.call(layer, other)
    unused = received * 1
    tensors = [x, sent, received, apart, unused, y]
    graph.register_multi_grad_hook(tensors, lambda found: seen.append(copies_of(found)))
    graph.register_multi_grad_hook(tensors, lambda _: any_seen.append(1), mode="any")
    for _ in range(2):
        side.backward((received + apart).sum(), retain_graph=True)
    assert [each is None for each in seen[0]] == [False] * 4 + [True, False]
    return gradients_of(side, x, y), seen, any_seen


def copies_of(found: Any) -> list[Tensor | None]:
    return [None if each is None else each.clone() for each in found]


@_graph.same("`register_multi_grad_hook` in the remote function")
def _(side: Side) -> Any:
    x = leaf()
    first, second = side.call(_hooked_twice, x * 2)
    side.backward(first.sum())
    return side.call(take_seen), gradients_of(side, x), second.detach()


_seen: list[Any] = []


def _hooked_twice(x: Tensor) -> Any:
    first, second = layer(x), layer(x * 2)
    third = first * 3
    graph.register_multi_grad_hook([x, first, second, third], lambda it: _seen.append([*it]))
    return first.sin(), second


def take_seen() -> list[Any]:
    """Returns what hooks of this process have seen, and forgets it."""
    seen = [copies_of(each) for each in _seen]
    _seen.clear()
    return seen


@_graph.same("`register_multi_grad_hook`, where a hook begins a pass of this process alone")
def _(side: Side) -> Any:
    seen: list[Any] = []
    inner = leaf()
    both = [inner * 2, inner * 3]
    graph.register_multi_grad_hook(both, lambda it: seen.append(copies_of(it)))
    received = side.call(layer, leaf() * 2)
    loss = (both[0] * both[1]).sum()
    received.register_hook(lambda _: loss.backward())
    side.backward(received.sum())
    return seen, inner.grad


@_graph.same("`grad_fn.register_prehook` of a result")
def _(side: Side) -> Any:
    x, seen = leaf(), []
    result = side.call(layer, x * 2)
    result.register_hook(lambda gradient: seen.append((1, gradient.clone())))
    result.grad_fn.register_prehook(lambda found: seen.append((2, found[0].clone())))
    result.grad_fn.register_prehook(lambda found: (found[0] * 3,))
    side.backward(result.pow(2).sum())
    return gradients_of(side, x), seen


@_graph.error("`grad_fn.register_hook` of a result", "where its node runs: register the hook there")
def _(side: Side) -> Any:
    received = side.call(layer, leaf() * 2)
    received.grad_fn.register_hook(lambda after, before: None)
    side.backward(received.sum())


@_graph.same("hooks of the node that accumulates a leaf's gradient, here and at the worker")
def _(side: Side) -> Any:
    x, seen = leaf(), []
    node = graph.get_gradient_edge(x).node
    node.register_prehook(lambda found: (found[0] * 3,))
    node.register_hook(lambda after, before: seen.append((after, before[0].clone())))
    x.register_hook(lambda gradient: seen.append(gradient.clone()))
    side.backward((side.call(layer, x * 2) + side.call(layer_with_hooked_weight, x * 3)).sum())
    return gradients_of(side, x), seen


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
