"""Arguments and results are trees: of tuples, lists, dicts and other types that torch can flatten.

A module is one leaf, and so is any object of a type that torch does not know. Only this file uses
torch's functions for trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils import _pytree

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
