"""Rows of the table: ``torch.func``, tracing, checkpoints, ``torch.amp`` and ``torch.nn``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import utils
from torch.nn.utils import parametrizations, prune, rnn, stateless
from torch.utils import checkpoint

from tests.contract.processes.ways_autograd import gradients_of
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

# torch.func

_func = Section("torch.func")

TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda it: f(it).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda it: f(it).sum())(x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](x),
}


@_func.error(
    "`grad`, `vmap`, `vjp`, `jvp`, `jacrev`, `jacfwd`, `hessian`, `functionalize`, `linearize` "
    "around a call",
    "all are refused",
)
def _(side: Side) -> Any:
    def run(it: Tensor) -> Tensor:
        made: Tensor = side.call(layer, it * 2)
        return made

    ways = [partial(way, run, X) for way in TRANSFORMS.values()]
    refuse_all(ways, "within torch.func", "traces the code")


@_func.same("the same in the remote function")
def _(side: Side) -> Any:
    return side.call(apply, _all_transforms, X)


def _all_transforms(x: Tensor) -> Any:
    weight = WEIGHT.detach()
    return [way(lambda it: (it * weight).tanh(), x) for way in TRANSFORMS.values()]


@_func.same("the same here, beside calls")
def _(side: Side) -> Any:
    received = side.call(layer, leaf() * 2)
    return received, _all_transforms(X)


@_func.same("gradients through a transform in the remote function")
def _(side: Side) -> Any:
    x = leaf()
    side.backward(side.call(_gradient_inside, x * 2).sum())
    return gradients_of(side, x)


def _gradient_inside(x: Tensor) -> Tensor:
    made: Tensor = torch.func.grad(lambda weight: (weight * x).tanh().sum())(WEIGHT)
    return made


@_func.same("a call within a transform whose arguments the transform has not made")
def _(side: Side) -> Any:
    return torch.func.vmap(lambda row: row * side.call(torch.mul, X, 2))(torch.stack([X, X]))


@_func.same("`functional_call`, and `torch.nn.utils.stateless.functional_call`, beside calls")
def _(side: Side) -> Any:
    module, weight = nn.Linear(3, 3, bias=False), leaf(torch.eye(3))
    first = torch.func.functional_call(module, {"weight": weight}, (side.call(layer, X),))
    second = stateless.functional_call(module, {"weight": weight}, (X,))
    side.backward(side.call(square, first * second).sum())
    return side.gradient(weight)


@_func.same("`stack_module_state` in the remote function")
def _(side: Side) -> Any:
    x = leaf()
    side.backward(side.call(_ensemble, x * 2).sum())
    return side.gradient(x)


def _ensemble(x: Tensor) -> Tensor:
    models = []
    for scale in (1.0, 2.0):
        model = nn.Linear(3, 3, bias=False)
        nn.init.constant_(model.weight, scale)
        models.append(model)
    parameters, buffers = torch.func.stack_module_state(models)

    def one(params: Any, buffs: Any) -> Any:
        return torch.func.functional_call(models[0], (params, buffs), (x,))

    made: Tensor = torch.func.vmap(one)(parameters, buffers)
    return made.tanh()


# Tracing

_traces = Section("Tracing and compiling")


class _Asking(nn.Module):
    def __init__(self, side: Side) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Any:
        return self.side.call(layer, x)


@_traces.error(
    "`torch.export`, `make_fx`, `torch.jit.trace` and `torch.fx.symbolic_trace` of code with a "
    "call",
    "all are refused",
)
def _(side: Side) -> Any:
    ways: list[Callable[[], object]] = [
        lambda: torch.export.export(_Asking(side), (X,), strict=False),
        lambda: make_fx(_Asking(side))(X),
        lambda: torch.jit.trace(_Asking(side), X),
        lambda: torch.fx.symbolic_trace(_Asking(side)),
    ]
    refuse_all(ways, "traces the code", "symbolic_trace")


@_traces.same("`torch.jit.trace` in the remote function")
def _(side: Side) -> Any:
    return side.call(apply, _traced, X)


def _traced(x: Tensor) -> Tensor:
    made: Tensor = torch.jit.trace(lambda it: it.sin() * 2, x)(x * 3)
    return made


@_traces.same("`torch.compile`: the graph breaks at the call", ("context",))
def _(side: Side) -> Any:
    x = leaf()

    def run(it: Tensor) -> Tensor:
        made: Tensor = side.call(layer, it * 2).sin()
        return made

    side.backward(torch.compile(run, backend="aot_eager")(x).sum())
    return gradients_of(side, x)


@_traces.same("tensors on the device `meta`")
def _(side: Side) -> Any:
    found = side.call(square, torch.empty(3, device="meta"))
    return str(found.device) == "meta", found.shape


# torch.utils.checkpoint

_checkpoint = Section("torch.utils.checkpoint")


@_checkpoint.same("`checkpoint(use_reentrant=False)` around a call: the call is made again")
def _(side: Side) -> Any:
    x = leaf()

    def block(it: Tensor) -> Tensor:
        made: Tensor = side.call(layer, it.exp()).sin()
        return made

    side.backward(checkpoint.checkpoint(block, x, use_reentrant=False).sum())
    return gradients_of(side, x)


@_checkpoint.same("`checkpoint(use_reentrant=False)` in the remote function")
def _(side: Side) -> Any:
    x = leaf()
    side.backward(side.call(_checkpointed, x * 2, False).sum())
    return gradients_of(side, x)


def _checkpointed(x: Tensor, use_reentrant: bool) -> Tensor:
    made: Tensor = checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant)
    return made.sin()


@_checkpoint.error("`checkpoint(use_reentrant=True)`, around a call", "use_reentrant|torchweft")
def _(side: Side) -> Any:
    def block(it: Tensor) -> Tensor:
        made: Tensor = side.call(layer, it.exp()).sin()
        return made

    side.backward(checkpoint.checkpoint(block, leaf(), use_reentrant=True).sum())


@_checkpoint.error("`checkpoint(use_reentrant=True)`, in the remote function", "use_reentrant")
def _(side: Side) -> Any:
    side.backward(side.call(_checkpointed, leaf() * 2, True).sum())


@_checkpoint.error("selective checkpoints, around a call", "only allowed to backward once")
def _(side: Side) -> Any:
    side.backward(_selectively(lambda it: side.call(layer, it.exp()).sin(), leaf()).sum())


@_checkpoint.same("selective checkpoints, in the remote function")
def _(side: Side) -> Any:
    x = leaf()
    side.backward(side.call(_selective_layer, x * 2).sum())
    return gradients_of(side, x)


def _selectively(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    def contexts() -> Any:
        return checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.exp.default])

    made: Tensor = checkpoint.checkpoint(function, x, use_reentrant=False, context_fn=contexts)
    return made


def _selective_layer(x: Tensor) -> Tensor:
    return _selectively(lambda it: layer(it).exp().sin(), x)


@_checkpoint.same("`checkpoint_sequential` in the remote function")
def _(side: Side) -> Any:
    x = leaf()
    side.backward(side.call(_in_sequence, x * 2).sum())
    return gradients_of(side, x)


def _in_sequence(x: Tensor) -> Tensor:
    made: Tensor = checkpoint.checkpoint_sequential(
        [layer, torch.sin, torch.exp], 3, x, use_reentrant=False
    )
    return made


# torch.amp

_amp = Section("torch.amp")


@_amp.same("`autocast` in the remote function")
def _(side: Side) -> Any:
    x = leaf()
    side.backward(side.call(_cast, x * 2).sum())
    return gradients_of(side, x)


def _cast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        made: Tensor = torch.outer(x, WEIGHT) @ WEIGHT
        return made.float()


@_amp.own("`autocast` around a call: the remote function runs without it")
def _(side: Side) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        assert not side.call(torch.is_autocast_enabled, "cpu")


@_amp.same("`autocast` here, beside a call")
def _(side: Side) -> Any:
    x = leaf()
    received = side.call(layer, x * 2)
    with torch.autocast("cpu", torch.bfloat16):
        product = torch.outer(received, x) @ received
    side.backward(product.float().sum())
    return gradients_of(side, x)


@_amp.same("`GradScaler`, with an optimizer of this process, outside of contexts", ("outside",))
def _(side: Side) -> Any:
    x = leaf()
    optimizer, scaler = torch.optim.SGD([x], lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad()
        side.backward(scaler.scale(side.call(layer, x * 2).sum()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return x, scaler.get_scale()


class _CastingSquare(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * gradients[0]


@_amp.same("`custom_fwd` and `custom_bwd`, here and in the remote function")
def _(side: Side) -> Any:
    x = leaf()
    with torch.autocast("cpu", torch.bfloat16):
        received = side.call(_casting_square, x * 2) + _casting_square(x)
    side.backward(received.sum())
    return side.gradient(x)


def _casting_square(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        made: Any = _CastingSquare.apply(x)
        return made


# torch.nn.utils

_utils = Section("torch.nn.utils")


@_utils.same(
    "`clip_grad_norm_`, `clip_grad_value_`, `get_total_norm`, `clip_grads_with_norm_`, outside "
    "of contexts",
    ("outside",),
)
def _(side: Side) -> Any:
    leaves = [leaf(), leaf()]
    side.backward(side.call(layer, leaves[0] * leaves[1] * 9).sum() * 9)
    norm = utils.clip_grad_norm_(leaves, 1.0)
    total = utils.get_total_norm([each.grad for each in leaves if each.grad is not None])
    utils.clip_grads_with_norm_(leaves, 0.5, total)
    utils.clip_grad_value_(leaves, 0.1)
    return norm, total, [each.grad for each in leaves]


@_utils.same("`parameters_to_vector`, `vector_to_parameters`")
def _(side: Side) -> Any:
    leaves = [leaf(), leaf()]
    vector = utils.parameters_to_vector(leaves)
    side.backward(side.call(square, vector * 2).sum())
    with torch.no_grad():
        utils.vector_to_parameters(side.call(torch.neg, vector.detach()), leaves)
    return leaves, [*map(side.gradient, leaves)]


def _linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


_CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "prune": lambda module: prune.l1_unstructured(module, "weight", amount=3),
}


@_utils.same("`parametrize`, `parametrizations`, `prune`, of modules here, beside calls")
def _(side: Side) -> Any:
    found: list[Any] = []
    for change in _CHANGES.values():
        module = _linear()
        change(module)
        side.backward(side.call(square, module(side.call(layer, X))).sum())
        found += [side.gradient(each) for each in module.parameters()]
        found += [buffer.clone() for buffer in module.buffers()]
    return found


@_utils.same("the same of modules in the remote function")
def _(side: Side) -> Any:
    x = leaf()
    side.backward(side.call(_all_changes, x * 2).sum())
    return gradients_of(side, x)


def _all_changes(x: Tensor) -> Tensor:
    for change in _CHANGES.values():
        module = _linear()
        change(module)
        x = module(x * WEIGHT)
    return x


@_utils.same("`rnn.pack_padded_sequence`, `pad_packed_sequence`, `pack_sequence`, as arguments")
def _(side: Side) -> Any:
    x = leaf(torch.arange(12.0).reshape(3, 4))
    packed = rnn.pack_padded_sequence(x.t().unsqueeze(2) * 1, [4, 2, 1])
    returned = side.call(_sin_of_packed, packed)
    padded, lengths = rnn.pad_packed_sequence(returned)
    side.backward(padded.pow(2).sum())
    return side.gradient(x), lengths


def _sin_of_packed(packed: Any) -> Any:
    return rnn.PackedSequence(packed.data.sin(), packed.batch_sizes)


@_utils.same("`fusion.fuse_linear_bn_eval`, `skip_init`, in the remote function")
def _(side: Side) -> Any:
    return side.call(apply, _fused, X)


def _fused(x: Tensor) -> Tensor:
    norm = nn.BatchNorm1d(3).eval()
    module: Any = utils.fusion.fuse_linear_bn_eval(_linear().eval(), norm)
    other = utils.skip_init(nn.Linear, 3, 3)
    other.load_state_dict(module.state_dict())
    made: Tensor = other(x[None])
    return made.detach()


# torch.nn

_modules = Section("Modules as arguments")


@_modules.same("a module as an argument: its parameters get gradients", ("context",))
def _(side: Side) -> Any:
    module = _linear()
    side.backward(side.call(_forward, module, X * 2).pow(2).sum())
    return [side.gradient(each) for each in module.parameters()]


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = module(x)
    return made


@_modules.own("a module as an argument: what the function sets in it stays in the worker's copy")
def _(side: Side) -> Any:
    module = nn.BatchNorm1d(3)
    side.call(_forward, module, torch.stack([X, 2 * X]))
    assert module.num_batches_tracked == 0
