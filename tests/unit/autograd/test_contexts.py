"""Tests what a context records, and what it returns to the program."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import Tensor

from tests.unit.autograd.cluster import flags_of
from torchweft.autograd import contexts
from torchweft.autograd.contexts import PARAMETER, REQUIRES_GRAD, Context, Contexts
from torchweft.errors import AutogradError
from torchweft.ids import worker_of


def receive(context: Context, *tensors: Tensor, message_id: int = 5) -> list[Tensor]:
    """Receives copies of tensors from worker 1."""
    copies = [tensor.detach().clone() for tensor in tensors]
    return context.record_receive(message_id, 1, copies, [flags_of(tensor) for tensor in tensors])


def test_message_without_gradients_is_not_recorded() -> None:
    context = Context(1, 0)
    assert context.record_send([torch.ones(2)], 3) == 0
    assert context.sends() == []
    assert context.known_workers == {3}
    (received,) = receive(context, torch.ones(2), message_id=0)
    assert not received.requires_grad
    assert context.receives() == []


def test_message_numbers_are_unique_in_the_group() -> None:
    registry = Contexts(2)
    value = torch.ones(2, requires_grad=True) * 2
    ids = [registry.get_or_create(number).record_send([value], 1) for number in (1, 1, 9)]
    assert len(set(ids)) == 3
    assert {worker_of(message_id) for message_id in ids} == {2}


def test_a_send_keeps_the_edges_of_tensors_that_require_grad() -> None:
    context = Context(1, 0)
    value = torch.ones(2, 3, requires_grad=True) * 2
    context.record_send([torch.ones(1), value, value.sum()], 1)
    (record,) = context.sends()
    assert record.edges[0].node is value.grad_fn
    assert [tuple(meta.shape) for meta in record.metas] == [(2, 3), ()]


class Twice(torch.autograd.Function):
    """A custom function whose node does not keep its own graph alive."""

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_send_keeps_the_graph_of_a_custom_function_alive() -> None:
    context = Context(1, 0)
    weight = torch.nn.Parameter(torch.ones(2))
    context.record_send([Twice.apply(weight)], 1)
    (record,) = context.sends()
    (gradient,) = torch.autograd.grad(record.edges, [weight], [torch.ones(2)])
    assert gradient.tolist() == [2.0, 2.0]


def test_a_context_keeps_sent_tensors_whose_gradients_torch_retains() -> None:
    # A pass must not come to one in the moment in which a thread that has sent it drops it.
    context = Context(1, 0)
    leaf = torch.ones(2, requires_grad=True)
    retained, other = leaf * 2, leaf * 3
    retained.retain_grad()
    context.record_send([other, retained, leaf], 1)
    of_retained, of_other = weakref.ref(retained), weakref.ref(other)
    del retained, other
    assert of_other() is None
    assert of_retained() is not None
    context.clear()
    assert of_retained() is None


def test_received_tensors_may_be_modified_in_place() -> None:
    context = Context(1, 0)
    source = torch.ones(2, requires_grad=True)
    first, plain, second = receive(context, source, torch.zeros(2), source * 3)
    first.mul_(5)
    (record,) = context.receives()
    assert not plain.requires_grad
    assert first.tolist() == [5.0, 5.0]
    assert second.grad_fn is record.nodes[1]
    assert [context.receive_of[node] for node in record.nodes] == [record, record]
    assert (record.from_worker, record.message_id, len(record.nodes)) == (1, 5, 2)


def test_plain_backward_says_what_to_call_instead() -> None:
    (received,) = receive(Context(1, 0), torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"torchweft\.autograd\.backward"):
        received.sum().backward()


def test_received_tensors_require_grad_also_under_no_grad() -> None:
    with torch.no_grad():
        (received,) = receive(Context(1, 0), torch.ones(2, requires_grad=True))
    assert received.requires_grad
    assert not received.is_leaf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_every_differentiable_type_gets_a_placeholder(dtype: torch.dtype) -> None:
    (received,) = receive(Context(1, 0), torch.ones(2, dtype=dtype, requires_grad=True))
    assert received.dtype is dtype
    assert received.requires_grad


def test_sparse_tensors_get_a_placeholder() -> None:
    (received,) = receive(Context(1, 0), torch.eye(3).to_sparse().requires_grad_())
    assert received.is_sparse
    assert received.requires_grad


def test_parameters_stay_parameters() -> None:
    weight, frozen = (torch.nn.Parameter(torch.ones(2), requires_grad=on) for on in (True, False))
    assert flags_of(weight) == REQUIRES_GRAD | PARAMETER
    received = receive(Context(1, 0), weight, frozen)
    assert all(isinstance(tensor, torch.nn.Parameter) for tensor in received)
    assert [tensor.requires_grad for tensor in received] == [True, False]


def test_received_memory_is_not_kept_by_the_context() -> None:
    context = Context(1, 0)
    (received,) = receive(context, torch.ones(1000, requires_grad=True))
    node = received.grad_fn
    assert node is not None
    leaf = node.next_functions[0][0].variable  # type: ignore[union-attr]
    assert leaf.untyped_storage().nbytes() == 0


def test_registry_makes_each_context_once() -> None:
    registry = Contexts(3)
    first, second = (registry.get_or_create(registry.new_id()).id for _ in range(2))
    assert first != second
    assert worker_of(first) == 3
    assert registry.get_or_create(first) is registry.get(first)
    assert registry.ids() == [first, second]


def test_released_context_does_not_come_back() -> None:
    registry = Contexts(0)
    context_id = registry.new_id()
    context = registry.get_or_create(context_id)
    weight = torch.nn.Parameter(torch.ones(2))
    context.record_send([weight * 2], 4)
    context.gradients.add_all([(weight, torch.ones(2))], ())
    assert registry.release(context_id) == {4}
    # Its thread may have been interrupted before it had told the others.
    assert registry.release(context_id) == {4}
    registry.notified(context_id)
    assert registry.release(context_id) == frozenset()
    assert (context.sends(), context.get_gradients()) == ([], {})
    with pytest.raises(AutogradError, match="not alive"):
        registry.get_or_create(context_id)
    with pytest.raises(AutogradError, match="not alive"):
        registry.get(context_id)


def test_a_released_context_takes_no_new_workers() -> None:
    registry = Contexts(0)
    context = registry.get_or_create(77)
    context.add_known_worker(4)
    assert registry.release(77) == {4}
    context.add_known_worker(4)
    with pytest.raises(AutogradError, match="not alive"):
        context.record_send([torch.ones(2, requires_grad=True)], 5)  # worker 5 would not be told


def test_release_may_come_before_the_first_use() -> None:
    registry = Contexts(0)
    registry.release(77)
    with pytest.raises(AutogradError):
        registry.get_or_create(77)


def test_current_context_belongs_to_the_thread() -> None:
    seen: list[int] = []
    with contexts.enter(4):
        with contexts.enter(5):
            assert contexts.current_id() == 5
        thread = threading.Thread(target=lambda: seen.append(contexts.current_id()))
        thread.start()
        thread.join()
        assert contexts.current_id() == 4
    assert contexts.current_id() == 0
    assert seen == [0]
