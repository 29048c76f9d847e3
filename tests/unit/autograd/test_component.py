"""Tests gates: they pass gradients on, wait in the right order, and disturb no other run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from torchweft.autograd.codec import PassMode
from torchweft.autograd.component import Start, put_last
from torchweft.autograd.contexts import edges_behind, gates_of, make_placeholders
from torchweft.autograd.graph import gradients_at

RETAINING = PassMode(retain_graph=True)


def leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


def run(gate: Node, take: Callable[[], Tensor | None], target: GradientEdge) -> Tensor | None:
    """Runs the graph behind a gate, whose gradient ``take`` returns, to a target."""
    with Start() as start:
        start.open(gate, take)
        (found,) = gradients_at([target], start.edges, start.gradients, RETAINING)
    return found


@pytest.mark.parametrize("is_sparse", [False, True])
def test_sparse_gradients_pass(is_sparse: bool) -> None:
    """A sparse tensor has a gate of another kind."""
    start = (torch.eye(3).to_sparse() if is_sparse else torch.eye(3)).requires_grad_()
    (gate,) = gates_of((start * 2,))
    gradient = torch.eye(3).to_sparse()
    found = run(gate, lambda: gradient, *edges_behind((gate,)))
    assert found is not None
    assert found.is_sparse == is_sparse
    assert found.to_dense().tolist() == torch.eye(3).tolist()


def test_gates_wait_last_whatever_threads_made_the_nodes() -> None:
    order: list[str] = []

    def noted(value: Tensor, name: str) -> Tensor:
        made = value * 2
        made.register_hook(lambda _: order.append(name))
        return made

    start = leaf()
    for _ in range(50):
        early = noted(start, "behind the first")
    later: list[Tensor] = []
    thread = threading.Thread(target=lambda: later.append(noted(noted(start, "free"), "root")))
    thread.start()
    thread.join()  # Its nodes have the lowest numbers.
    second = noted(start, "behind the second")
    first_gate, second_gate = gates_of((early, second))
    gates = [(7, first_gate), (8, second_gate)]
    nodes = [each.grad_fn for each in (early, second, *later)]
    behind = [target for node in nodes if node for target, _ in node.next_functions]
    nodes += [target for target in behind if target is not None]

    def take(name: str) -> Tensor:
        order.append(name)
        return torch.ones(3)

    put_last(gates, nodes)
    with Start() as begun:
        begun.edges, begun.gradients = [get_gradient_edge(later[0])], [torch.ones(3)]
        begun.open(first_gate, lambda: take("first gate"))
        begun.open(second_gate, lambda: take("second gate"))
        gradients_at([get_gradient_edge(start)], begun.edges, begun.gradients, PassMode())
    assert order == [
        "root", "free", "second gate", "behind the second", "first gate", "behind the first",
    ]  # fmt: skip


def received() -> Tensor:
    _, (placeholder,) = make_placeholders([torch.ones(3)])
    return placeholder


def run_to(tensor: Tensor) -> None:
    root = (get_gradient_edge(tensor * 3),)
    gradients_at([get_gradient_edge(tensor)], root, (torch.ones(3),), RETAINING)


def test_probes_come_and_go_while_a_run_is_at_the_node() -> None:
    """As those of other threads do: torch crashes if the tables of a node's hooks change then."""
    made = received()
    node = made.grad_fn
    assert node is not None
    seen: list[str] = []

    def pass_others(_: Tensor) -> None:
        with Start() as others:
            for _ in range(1000):
                others.probe(node, lambda _: seen.append("other"), None)

    made.register_hook(pass_others)
    with Start() as start:
        start.probe(node, lambda _: seen.append("own"), None)
        run_to(made)
    assert seen == ["own"]


def test_another_run_passes_a_gate_by() -> None:
    start = leaf()
    (gate,) = gates_of((start * 2,))
    target, root = get_gradient_edge(start), (GradientEdge(gate, 0),)
    with Start() as waiting:
        waiting.open(gate, lambda: torch.full((3,), 7.0))
        (found,) = gradients_at([target], root, (torch.ones(3),), RETAINING)
        (own,) = gradients_at([target], waiting.edges, waiting.gradients, RETAINING)
    assert found is not None
    assert own is not None
    assert (found.tolist(), own.tolist()) == ([2.0] * 3, [14.0] * 3)


def test_gates_are_made_while_other_threads_use_the_same_leaf() -> None:
    """A thread in an operation on a leaf may wait for the interpreter lock with the leaf locked."""
    shared = leaf()
    ends = threading.Event()

    def use() -> None:
        while not ends.is_set():
            shared.clone()

    threads = [threading.Thread(target=use, name=f"user {number}") for number in range(3)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(50_000):
            gates_of((shared,))
    finally:
        ends.set()
        sys.setswitchinterval(interval_s)
        for thread in threads:
            thread.join()
