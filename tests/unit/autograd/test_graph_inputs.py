"""Tests which tensors a pass for given inputs passes through, and what has no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import REQUIRES_GRAD, Context, Gradients
from torchweft.autograd.graph import (
    InputGradients,
    checked_inputs,
    place_of,
)
from torchweft.autograd.local_pass import LocalPass
from torchweft.engine.protocol.backward import ROOTS
from torchweft.errors import ArgumentTypeError, AutogradError

HERE, THERE = 0, 1


class Worker:
    """A worker that calls another worker, whose answers are made up."""

    def __init__(self) -> None:
        self.context = Context(1, HERE)
        self._answers = 0

    def call(self, *tensors: Tensor) -> Tensor:
        self.context.record_send(tensors, THERE)
        return self.receive()

    def receive(self) -> Tensor:
        self._answers += 1
        number = THERE << 48 | self._answers
        return self.context.record_receive(number, THERE, [torch.ones(2)], [REQUIRES_GRAD])[0]

    def input_gradients(self, *inputs: Tensor, **others: Any) -> InputGradients:
        return InputGradients(self.context, inputs, **others)


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def node_of(tensor: Tensor) -> object:
    return place_of(tensor)[0]


def test_a_pass_goes_through_a_tensor_behind_which_there_is_another_here() -> None:
    worker = Worker()
    first = leaf()
    second = first * 2
    input_gradients = worker.input_gradients(second, first)
    assert input_gradients.passed == [place_of(second)]
    assert list(input_gradients.stops) == [node_of(first)]


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        ([], AutogradError, "'inputs' argument cannot be empty"),
        (3, ArgumentTypeError, "the inputs must be a list of tensors, not an int"),
        ([leaf(), "x"], ArgumentTypeError, r"inputs\[1\] is a str"),
        ([torch.ones(2)], AutogradError, r"inputs\[0\] does not require grad"),
    ],
)
def test_what_has_no_gradient_is_told(inputs: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        checked_inputs(inputs)


def test_a_pass_is_kept_from_what_is_behind_a_result_that_has_been_replaced() -> None:
    """The leaf is reached on another path too, and the engine would continue through the result."""
    context = Context(1, HERE)
    weight = leaf()
    result = weight * 3
    replacement = weight.detach() * 3
    replaced = {place_of(result): replacement.requires_grad_()}
    input_gradients = InputGradients(context, (), replaced, for_inputs=False)
    gradients = Gradients()
    local = LocalPass(context, PassMode(retain_graph=True), gradients, input_gradients)
    local.start([(result * weight).sum() + weight.sum()])
    _, progress = local.work()
    assert progress.executed == [ROOTS]
    # 3 from the product, where the result counts as a constant, and 1 from the sum.
    assert gradients.snapshot()[weight].tolist() == [4, 4]
    (roots,) = input_gradients.further_roots()
    assert [gradient.tolist() for gradient in roots.gradients] == [[1, 1]]
    local.close()
