"""Trees of arguments and results: tuples, lists, dicts and other types that torch can flatten.

A module is one leaf, and so is any object of a type that torch does not know. Only this file uses
torch's functions for trees. ``module_clone`` copies modules, and trees of tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from torchweft.errors import ArgumentTypeError, ConfigurationError

Spec = _pytree.TreeSpec
IsLeaf = Callable[[Any], bool]


def leaves(tree: object) -> Iterable[Any]:
    """Iterates over the leaves of a tree."""
    return _pytree.tree_iter(tree)


def flatten(tree: object, is_leaf: IsLeaf | None = None) -> tuple[list[Any], Spec]:
    """Returns the leaves of a tree, and the spec to rebuild it."""
    return _pytree.tree_flatten(tree, is_leaf)


def flatten_as(spec: Spec, tree: object) -> list[Any]:
    """Returns the leaves of a tree in the order of another, whose dicts may order keys otherwise.

    Raises:
        ValueError: The two trees differ in structure.
    """
    return spec.flatten_up_to(tree)


def unflatten(values: Iterable[Any], spec: Spec) -> Any:
    """Rebuilds a tree from its leaves."""
    return _pytree.tree_unflatten(values, spec)


def whole_unless(*kinds: type) -> IsLeaf:
    """Returns an ``is_leaf`` that keeps a branch without leaves of ``kinds`` as one object."""
    return lambda branch: not any(isinstance(leaf, kinds) for leaf in leaves(branch))


def is_leafless(branch: object) -> bool:
    """Whether a branch has no leaf."""
    return not any(True for _ in leaves(branch))


def paths(tree: object, is_leaf: IsLeaf | None = None) -> list[str]:
    """Returns the path of each leaf, such as ``[1]['x']``, in the order of ``flatten``."""
    try:
        found, _ = _pytree.tree_flatten_with_path(tree, is_leaf)
    except ValueError:  # it contains a type that torch can flatten, but not name the children of
        return [f" (leaf {number})" for number in range(len(flatten(tree, is_leaf)[0]))]
    return [_pytree.keystr(path) for path, _ in found]


# Copies of modules: they share tensors with the original, or lead to it in the graph


Target = TypeVar("Target")


def module_clone(
    target: Target,
    *,
    by: str = "reference",
    detach_buffers: bool = False,
    device: torch.device | str | int | None = None,
) -> Target:
    """Returns a copy of a module; ``by`` selects how parameters and buffers are copied.

    Everything else is copied deeply, so an attribute set on the copy is not set on the original. A
    tensor that the module has at several places is one tensor in the copy, too.

    Calls to other workers need no such copy: Parameters stay in the graph without it.

    Args:
        target: The module; or a tree of tensors, such as a dict or list.
        by: ``"reference"``: the same tensors. ``"clone"`` or ``"copy"``: plain tensors, clones in
            the graph, so that gradients of results computed with them reach the originals.
            ``"deepcopy"``: new leaves, and Parameters stay Parameters.
        detach_buffers: Whether buffers are copied without their history, whatever ``by`` is; then
            the copy's changes to its buffers do not show in the original.
        device: The device of the copy's tensors; by default they stay where they are. Tensors that
            must move to ``device`` are not shared.

    Raises:
        ConfigurationError: ``by`` is another value.
        ArgumentTypeError: There is no tensor in ``target``.
    """
    way = _WAYS.get(by)
    if way is None:
        raise ConfigurationError(
            f"by is {by!r}; it must be 'reference', 'clone', 'copy' or 'deepcopy'"
        )
    place = None if device is None else torch.device(device)
    if isinstance(target, nn.Module):
        way_of_buffers = _new_leaf if detach_buffers else way
        # deepcopy takes an object in the memo for copied already, wherever it finds it.
        memo: dict[int, Any] = {id(each): way(each, place) for each in target.parameters()}
        memo |= {id(each): way_of_buffers(each, place) for each in target.buffers()}
        return copy.deepcopy(target, memo)
    leaves, spec = flatten(target)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise ArgumentTypeError(
            f"target is a {type(target).__name__} without tensors; pass a torch.nn.Module, or a "
            "tree of tensors"
        )
    copies = [way(leaf, place) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    clone: Target = unflatten(copies, spec)
    return clone


def _reference(tensor: Tensor, place: torch.device | None) -> Tensor:
    return tensor if place is None else tensor.to(place)


def _clone(tensor: Tensor, place: torch.device | None) -> Tensor:
    return _reference(tensor.clone(), place)


def _new_leaf(tensor: Tensor, place: torch.device | None) -> Tensor:
    copied = _clone(tensor.detach(), place)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


_WAYS: dict[str, Callable[[Tensor, torch.device | None], Tensor]] = {
    "reference": _reference,
    "ref": _reference,
    "clone": _clone,
    "copy": _clone,
    "deepclone": _new_leaf,
    "deepcopy": _new_leaf,
}
"""The ways to copy a tensor, by the names that ``torchopt.module_clone`` accepts."""
