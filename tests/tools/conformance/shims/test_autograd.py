"""Tests the view of a context's messages as PyTorch nodes."""

from __future__ import annotations

import torch

from tests.conformance.shims.autograd import GraphNode, recv_functions, send_functions
from tests.unit.autograd.cluster import flags_of
from torchweft.autograd.contexts import Context
from torchweft.compat.autograd import DistAutogradContext
from torchweft.engine.codec.objects import pack, unpack

RECEIVE = "torch::distributed::autograd::RecvRpcBackward"
SEND = "torch::distributed::autograd::SendRpcBackward"


def forward(context: Context, *values: object) -> list[object]:
    """Sends values from here to worker 1, and receives them here as if from worker 2."""
    packed = pack(values, main_by_name=True)
    context.record_send(packed.tensors, 1)
    copies = [tensor.detach().clone() for tensor in packed.tensors]
    flags = [flags_of(tensor) for tensor in packed.tensors]
    received = context.record_receive(100 + len(context.receives()), 2, copies, flags)
    return list(unpack(packed.payload, received, ()))


def test_a_walk_from_what_was_sent_ends_at_leaves_and_at_what_was_received() -> None:
    context = Context(7, 0)
    view = DistAutogradContext(context)
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    first, second = forward(context, leaf, other)
    forward(context, first + second)  # type: ignore[operator]
    assert (view._context_id(), view._known_worker_ids()) == (7, {1, 2})
    sent, again = send_functions(view).values()
    assert sent.name() == again.name() == SEND
    for (node, output_nr), tensor in zip(sent.next_functions, (leaf, other), strict=True):
        assert node is not None
        assert (node.name(), output_nr) == ("torch::autograd::AccumulateGrad", 0)
        assert node.variable is tensor
    ((added, _),) = again.next_functions
    assert added is not None
    assert added.name() == "AddBackward0"
    (one, one_nr), (two, two_nr) = added.next_functions
    assert one is not None
    assert (one.name(), one_nr, two_nr) == (RECEIVE, 0, 1)
    assert one == two
    assert hash(one) == hash(two)
    assert one.next_functions == ()
    received = next(iter(recv_functions(view).values()))
    assert first.grad_fn == received  # type: ignore[attr-defined]
    assert one == received != added


def test_sparse_tensors_are_seen_whole() -> None:
    context = Context(7, 0)
    view = DistAutogradContext(context)
    leaf = torch.sparse_coo_tensor(
        [[0, 1, 1]], [1.0, 2.0, 3.0], (3,), check_invariants=True, requires_grad=True
    )
    (received,) = forward(context, leaf)
    forward(context, received)
    sent, again = send_functions(view).values()
    ((node, _),) = sent.next_functions
    assert node is not None
    assert node.variable is leaf
    first, _ = recv_functions(view).values()
    assert again.next_functions == ((first, 0),)
    assert received.grad_fn == first  # type: ignore[attr-defined]


def test_a_node_is_neither_another_nor_something_else() -> None:
    one, two = ((torch.ones(2, requires_grad=True) * 2).grad_fn for _ in range(2))
    assert one is not None
    assert two is not None
    view = GraphNode(one, {})
    assert view == one
    assert view != two
    assert view != 3
    assert view.next_functions != ()
