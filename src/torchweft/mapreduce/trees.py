"""Arguments and results are trees: of tuples, lists, dicts and what else torch can take apart.

A module is one leaf, and so is whatever torch does not know. Only this file knows how torch does
that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils import _pytree

Spec = _pytree.TreeSpec
IsLeaf = Callable[[Any], bool]


def leaves(tree: object) -> Iterable[Any]:
    """Goes through the leaves of a tree."""
    return _pytree.tree_iter(tree)


def flatten(tree: object, is_leaf: IsLeaf | None = None) -> tuple[list[Any], Spec]:
    """Takes a tree apart: its leaves, and what it takes to put them together again."""
    return _pytree.tree_flatten(tree, is_leaf)


def flatten_as(spec: Spec, tree: object) -> list[Any]:
    """Returns the leaves of a tree in the order of another one, whose dicts may be in another.

    Raises:
        ValueError: The two differ in structure.
    """
    return spec.flatten_up_to(tree)


def unflatten(values: Iterable[Any], spec: Spec) -> Any:
    """Puts a tree together."""
    return _pytree.tree_unflatten(values, spec)


def whole_unless(*kinds: type) -> IsLeaf:
    """Returns the ``is_leaf`` by which a branch without anything of ``kinds`` stays one object."""
    return lambda branch: not any(isinstance(leaf, kinds) for leaf in leaves(branch))


def is_leafless(branch: object) -> bool:
    """Tells whether there is no leaf in a branch."""
    return not any(True for _ in leaves(branch))


def paths(tree: object, is_leaf: IsLeaf | None = None) -> list[str]:
    """Returns where each leaf is, such as ``[1]['x']``, in the order of ``flatten``."""
    try:
        found, _ = _pytree.tree_flatten_with_path(tree, is_leaf)
    except ValueError:  # in it is something that torch can take apart, but has no names for
        return [f" (leaf {number})" for number in range(len(flatten(tree, is_leaf)[0]))]
    return [_pytree.keystr(path) for path, _ in found]
