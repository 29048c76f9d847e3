"""Tests what a context records, and what it returns to the program."""

from __future__ import annotations

import pytest
import torch

from torchweft.autograd.contexts import Contexts
from torchweft.errors import AutogradError


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
