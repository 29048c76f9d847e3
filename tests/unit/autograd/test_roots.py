"""Tests which roots a pass accepts, and the errors for other roots."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tables import cases
from torchweft.autograd.pass_arguments import roots_of
from torchweft.errors import ArgumentTypeError, AutogradError

SCALAR = torch.tensor(2.0, requires_grad=True) * 3
ROW = torch.ones(2, requires_grad=True) * 3


def test_the_gradient_of_a_scalar_is_one() -> None:
    roots = roots_of([SCALAR, ROW], [None, torch.tensor([4.0, 5.0])])
    assert [gradient.tolist() for gradient in roots.gradients] == [1.0, [4.0, 5.0]]
    assert [edge.node for edge in roots.edges] == [SCALAR.grad_fn, ROW.grad_fn]


def test_one_element_is_a_scalar_of_any_shape() -> None:
    (gradient,) = roots_of([SCALAR.view(1, 1)]).gradients
    assert gradient.tolist() == [[1.0]]


@cases(
    ("tensors", "gradients", "error", "text"),
    [
        ([], None, AutogradError, "at least one root"),
        (3, None, ArgumentTypeError, r"a list of tensors, not an int; for one loss pass \[loss\]"),
        ([SCALAR, 3], None, ArgumentTypeError, "root 1 is an int"),
        ([SCALAR.detach()], None, AutogradError, "root 0 does not require grad"),
        ([ROW], None, AutogradError, r"root 0 has shape \(2,\).*or pass the gradient there"),
        ([SCALAR], [], AutogradError, "0 gradients for 1 root"),
        ([SCALAR], [2.0], ArgumentTypeError, "gradient for root 0 is a float"),
        ([ROW], [torch.ones(3)], AutogradError, r"root 0 has shape \(3,\); the root has \(2,\)"),
        ([ROW], [torch.ones(2, dtype=torch.cfloat)], AutogradError, "torch.complex64; the root"),
    ],
)
def test_what_cannot_be_a_root_is_told(
    tensors: Any, gradients: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        roots_of(tensors, gradients)


def test_errors_say_what_the_caller_calls_them() -> None:
    with pytest.raises(AutogradError, match=r"output 0 has shape .* all outputs need"):
        roots_of([ROW], what="output")
