from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from tests.tables import cases
from torchweft.autograd.contexts import is_without_memory, make_placeholders


def received(*sizes: int) -> list[Tensor]:
    return [torch.arange(float(size)) for size in sizes]


@pytest.mark.parametrize("count", [1, 3])
def test_each_is_the_output_of_a_node_of_its_own(count: int) -> None:
    nodes, made = make_placeholders(received(*range(1, count + 1)))
    edges = [get_gradient_edge(each) for each in made]
    assert [(edge.node, edge.output_nr) for edge in edges] == [(node, 0) for node in nodes]
    assert len(set(nodes)) == count
    assert [each.tolist() for each in made] == [list(range(n)) for n in range(1, count + 1)]
    assert all(each.requires_grad and not each.is_leaf for each in made)


def test_they_take_over_the_memory() -> None:
    tensors = received(2, 3)
    addresses = [each.data_ptr() for each in tensors]
    _, made = make_placeholders(tensors)
    assert [each.data_ptr() for each in made] == addresses


def test_what_is_behind_them_has_no_memory() -> None:
    (node,), made = make_placeholders(received(2))
    ((behind, _),) = node.next_functions
    assert behind is not None
    assert is_without_memory(behind.variable)  # type: ignore[attr-defined]
    assert not is_without_memory(made[0])


def test_a_program_may_change_them_in_place() -> None:
    _, (made,) = make_placeholders(received(3))
    made.mul_(2)[0] = 5.0
    assert made.tolist() == [5, 2, 4]
    made.detach().add_(1)
    assert made.tolist() == [6, 3, 5]


@pytest.mark.parametrize("is_grad_enabled", [False, True])
def test_they_are_made_in_any_grad_mode(is_grad_enabled: bool) -> None:
    with torch.set_grad_enabled(is_grad_enabled):
        _, (made,) = make_placeholders(received(2))
        assert torch.is_grad_enabled() is is_grad_enabled
    assert made.requires_grad


def test_a_backward_pass_of_torch_says_what_to_call() -> None:
    _, (made,) = make_placeholders(received(2))
    with pytest.raises(RuntimeError, match=r"torchweft\.autograd\.backward"):
        made.sum().backward()


@cases(
    ("leaf", "is_without"),
    [
        (torch.empty(0), True),
        (torch.ones(1), False),
        (torch.sparse_coo_tensor(size=(0,), check_invariants=True), False),
        (None, False),
    ],
)
def test_few_tensors_are_without_memory(leaf: object, is_without: bool) -> None:
    assert is_without_memory(leaf) is is_without
