"""Tests that a pass over several workers yields the gradients of a single process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.thorough import examples
from tests.unit.autograd import awkward_programs, programs
from tests.unit.autograd.cluster import (
    Cluster,
    Program,
    check,
)
from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import Context
from torchweft.autograd.local_pass import LocalPass
from torchweft.errors import AutogradError, ProtocolError

T = TypeVar("T")


@pytest.mark.parametrize(
    "program", programs.ALL + awkward_programs.ALL, ids=lambda program: program.__name__
)
def test_gradients_equal_those_of_a_single_process(program: Program) -> None:
    for seed in range(examples(3)):
        check(program, seed)


def _on_a_thread(function: Callable[[], T]) -> T:
    """Runs a function on a thread of its own, as a worker does: each thread numbers its nodes."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_gradients_of_gradients_of_what_was_written_to_a_view() -> None:
    """The engine may reach the operation on the view before the node that contains it."""

    def forward(weight: Tensor) -> Tensor:
        written = torch.tanh(weight * 0.5) * 2
        written[1:].tanh_()
        return torch.tanh(written * weight).sum()

    def norm(gradient: Tensor) -> Tensor:
        return gradient.pow(2).sum()

    def leaf() -> Tensor:
        return torch.full((3,), 0.3, dtype=torch.float64, requires_grad=True)

    def run(roots: list[Tensor], mode: PassMode) -> Tensor:
        local = LocalPass(context, mode)
        local.start(roots)
        local.work()
        assert not local.is_waiting
        return context.gradients.snapshot()[weight]

    context, weight = Context(1, 0), leaf()
    loss = _on_a_thread(lambda: forward(weight))
    first = _on_a_thread(lambda: norm(run([loss], PassMode(True, True))))
    found = _on_a_thread(lambda: run([first, loss], PassMode()))

    wanted = leaf()
    loss = forward(wanted)
    (gradient,) = torch.autograd.grad(loss, wanted, create_graph=True)
    (second,) = torch.autograd.grad([norm(gradient), loss], wanted)
    torch.testing.assert_close(found, gradient + second)


@pytest.mark.parametrize("is_cut", [False, True])
def test_reentrant_checkpointing_is_refused_and_adds_to_nothing(is_cut: bool) -> None:
    cluster = Cluster()
    state, weight = cluster.parameter(1, "s", 3) * 2, cluster.parameter(1, "w", 3)
    made = checkpoint(lambda value: torch.tanh(value * weight), state, use_reentrant=True)
    result = cluster.send(1, 0, made)[0]
    if is_cut:
        fed = cluster.send(0, 1, result)[0]
        result = cluster.send(1, 0, made * fed)[0]
    with pytest.raises(AutogradError, match="use_reentrant=False") as caught:
        cluster.backward([result.sum()])
    assert (caught.value.worker, caught.value.operation) == (
        "worker1",
        "CheckpointFunction.backward",
    )
    assert weight.grad is None


def local_pass_with_two_sends() -> tuple[LocalPass, Context, Tensor, list[int]]:
    """Returns a pass with two sends that share a node and reach message 99 of worker 1."""
    context = Context(1, 0)
    weight = torch.nn.Parameter(torch.ones(2))
    (received,) = context.record_receive(99, 1, [torch.ones(2)], [1])
    shared = weight * received
    message_ids = [context.record_send([shared * factor], 1) for factor in (1, 10)]
    return LocalPass(context), context, weight, message_ids


def test_gradients_that_have_run_are_not_kept_until_the_context_ends() -> None:
    local, _, _, message_ids = local_pass_with_two_sends()
    kept = []
    for message_id in message_ids:
        gradient = torch.ones(2)
        kept.append(weakref.ref(gradient))
        local.arrive(message_id, [gradient])
    del gradient
    local.work()
    assert [each() for each in kept] == [None, None]


def test_gradients_that_are_not_due_are_refused() -> None:
    local, _, _, (first, _) = local_pass_with_two_sends()
    with pytest.raises(ProtocolError, match="1 tensors"):
        local.arrive(first, [])
    with pytest.raises(ProtocolError, match="shape"):
        local.arrive(first, [torch.ones(1)])
    local.arrive(first, [torch.ones(2)])
    with pytest.raises(ProtocolError, match="without being due"):
        local.arrive(first, [torch.ones(2)])
    with pytest.raises(ProtocolError, match="not among those sent"):
        local.announce([12345])
