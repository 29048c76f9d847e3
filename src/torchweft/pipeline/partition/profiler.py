"""Measures a model layer by layer, and leaves no trace in it.

Each layer runs alone on the output of the layer before it, cut off from that layer's graph, so that
its time and memory are its own. The backward pass asks for the gradients of input and parameters
with ``torch.autograd.grad``: nothing is accumulated into ``.grad``, and hooks that wait for
accumulated gradients do not run.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, Sequential
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

from torchweft.arguments import wrong_type
from torchweft.pipeline.errors import PartitionError
from torchweft.pipeline.partition.costs import LayerProfile, Profile

_WARM_UPS = 2


def profile(
    model: Sequential | Iterable[Module],
    example: Any,
    *,
    repeats: int = 5,
    optimizer_ratio: float | None = None,
) -> Profile:
    """Returns time and memory of each layer, measured with an example.

    Modules run in the mode they are in: call ``train()`` before, as for training. Blocks until all
    layers have run. The model must not be used by another thread meanwhile. Afterwards parameters,
    gradients, buffers, modes and torch's random generators are as before; state that a module keeps
    elsewhere is not restored. On a GPU, times are those until it has done the work.

    Args:
        model: The layers: an ``nn.Sequential``, or modules of which each is a layer. As in
            ``nn.Sequential``, the output of a layer is the only argument of the next one.
        example: One micro-batch, the argument of the first layer: a tensor, or tensors in tuples,
            lists and dicts. It stays the caller's and is not changed. The batch size is the first
            dimension of its first tensor.
        repeats: Number of runs of each layer, after two for warm-up; the median counts.
        optimizer_ratio: Bytes of optimizer state for each byte of weights, such as 2 for Adam;
            None if not known.

    Raises:
        PartitionError: If there is no layer, or one is lazy and has not run yet.
        ArgumentTypeError: If a layer is no module, or the example has no tensor.
    """
    if repeats < 1:
        raise PartitionError(f"repeats={repeats} must be 1 or more")
    layers = _named_layers(model)
    tensors = list(_tensors(example))
    if not tensors:
        raise wrong_type("example", example, "pass a tensor, or tensors in tuples, lists and dicts")
    tensors_of_layers = [tensor for _, layer in layers for tensor in _state_of(layer)]
    gpus = {t.device.index for t in [*tensors, *tensors_of_layers] if t.device.type == "cuda"}
    found, value = [], _map(example, _cut_off)
    with (
        torch.random.fork_rng(devices=gpus),
        torch.inference_mode(False),
        torch.enable_grad(),
        _restored(layer for _, layer in layers),
    ):
        for name, layer in layers:
            measured, value = _measure(_Layer(name, layer, value), repeats, optimizer_ratio)
            found.append(measured)
    first = tensors[0]
    return Profile(tuple(found), first.shape[0] if first.dim() else 1)


class _Layer(NamedTuple):
    """A layer and its argument, whose tensors require a gradient where the real ones do."""

    name: str
    module: Module
    argument: Any


def _measure(
    layer: _Layer, repeats: int, optimizer_ratio: float | None
) -> tuple[LayerProfile, Any]:
    """Returns the layer's profile, and its output as the argument of the next layer."""
    saved_bytes, output = _saved_and_output(layer)
    for _ in range(_WARM_UPS - 1):
        _times(layer)
    forward, backward = zip(*(_times(layer) for _ in range(repeats)), strict=True)
    trained = [p for p in layer.module.parameters() if p.requires_grad]
    trained_bytes = _size_of(trained)
    measured = LayerProfile(
        name=layer.name,
        forward_seconds=statistics.median(forward),
        backward_seconds=statistics.median(backward),
        activation_bytes=_size_of(_tensors(output)),
        saved_bytes=saved_bytes,
        weight_bytes=trained_bytes,
        fixed_bytes=_size_of(_state_of(layer.module)) - trained_bytes,
        optimizer_ratio=optimizer_ratio,
    )
    return measured, output


def _saved_and_output(layer: _Layer) -> tuple[int, Any]:
    """Returns the bytes of all storages saved for the backward pass, without the layer's own."""
    storages: dict[tuple[torch.device, int], int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[_place_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # The graph in the output keeps the storages, so that no two have one address.
        output = layer.module(_map(_leaves(layer), torch.clone))
    for tensor in _state_of(layer.module):
        storages.pop(_place_of(tensor), None)
    return sum(storages.values()), _map(output, _cut_off)


def _times(layer: _Layer) -> tuple[float, float]:
    """Returns the seconds of one forward and one backward pass."""
    leaves = _leaves(layer)
    # A layer that works in place may neither change a leaf nor the argument of the next run.
    argument = _map(leaves, torch.clone)
    begin_s = _now(layer)
    output = layer.module(argument)
    forward_s = _now(layer) - begin_s
    outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    wanted = [t for t in [*_tensors(leaves), *layer.module.parameters()] if t.requires_grad]
    if not outputs or not wanted:
        return forward_s, 0.0
    gradients = [torch.ones_like(tensor) for tensor in outputs]
    begin_s = _now(layer)
    torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
    return forward_s, _now(layer) - begin_s


def _now(layer: _Layer) -> float:
    """Returns the time, in seconds, at which all work that was given to the layer's GPU is done."""
    for tensor in [*_state_of(layer.module), *_tensors(layer.argument)]:
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)
            break
    return time.perf_counter()


@contextlib.contextmanager
def _restored(layers: Iterable[Module]) -> Iterator[None]:
    """Puts modes and buffers of the layers back at the end, into the same tensors."""
    modules = {module for layer in layers for module in layer.modules()}
    modes = {module: module.training for module in modules}
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                setattr(module, name, buffer)
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _named_layers(model: Sequential | Iterable[Module]) -> list[tuple[str, Module]]:
    if isinstance(model, Module) and not isinstance(model, (Sequential, ModuleList)):
        raise wrong_type("model", model, "pass an nn.Sequential, or a list of modules")
    layers = []
    for key, layer in _items(model):
        if not isinstance(layer, Module):
            raise wrong_type(f"layer {key}", layer, "pass a list of modules")
        name = f"{key}:{type(layer).__name__}"
        if any(is_lazy(tensor) for tensor in _state_of(layer)):
            raise PartitionError(
                f"layer {name} has lazy parameters; run the model once before it is profiled"
            )
        layers.append((name, layer))
    if not layers:
        raise PartitionError("the model has no layers; it needs at least one")
    return layers


def _items(model: Module | Iterable[Module]) -> Iterable[tuple[int | str, Module]]:
    if not isinstance(model, Module):
        return enumerate(model)
    # named_children would leave out a module that is there twice.
    named = model.named_modules(remove_duplicate=False)
    return [(name, child) for name, child in named if name and "." not in name]


def _state_of(module: Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _leaves(layer: _Layer) -> Any:
    return _map(layer.argument, _cut_off)


def _cut_off(tensor: Tensor) -> Tensor:
    """Returns the tensor as a leaf that requires a gradient if the tensor does."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _place_of(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _size_of(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the elements of tensors, of each tensor once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors in tuples, lists and dicts."""
    return (leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _map(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns the tree with a function applied to each tensor once; other leaves stay."""
    done: dict[Tensor, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if tensor not in done:
            done[tensor] = function(tensor)
        return done[tensor]

    return _pytree.tree_map_only(Tensor, once, tree)
