"""Tests flattening trees: which branches stay one object, and the paths of leaves."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree

from torchweft.mapreduce import trees


def test_a_branch_without_anything_of_a_kind_stays_one_object() -> None:
    plain, numbers, w = [1, {"a": "b"}], (2, 3), torch.zeros(1)
    flat, spec = trees.flatten({"plain": plain, "mixed": [w, numbers]}, trees.whole_unless(Tensor))
    assert [id(leaf) for leaf in flat] == [id(plain), id(w), id(numbers)]
    assert trees.unflatten(flat, spec) == {"plain": plain, "mixed": [w, numbers]}


def test_modules_are_leaves() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert list(trees.leaves([module])) == [module]


def test_a_branch_of_empty_branches_has_no_leaf() -> None:
    assert trees.is_leafless(((), [{}]))
    assert not trees.is_leafless(((), [None]))


def test_paths_are_those_of_the_leaves() -> None:
    tree = (1, {"x": [2, 3]})
    assert trees.paths(tree) == ["[0]", "[1]['x'][0]", "[1]['x'][1]"]
    assert trees.paths(tree, trees.whole_unless(str)) == [""]


class Unnamed:
    def __init__(self, *values: object) -> None:
        self.values = values


def test_leaves_of_what_has_no_names_are_numbered() -> None:
    _pytree.register_pytree_node(
        Unnamed, lambda node: (list(node.values), None), lambda values, _: Unnamed(*values)
    )
    assert trees.paths([Unnamed(1, 2), 3]) == [" (leaf 0)", " (leaf 1)", " (leaf 2)"]
