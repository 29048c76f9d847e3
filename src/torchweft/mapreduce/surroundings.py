"""Captures a thread's ambient state, so that a map can restore it on other threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from torchweft.agent.served_calls import current_call
from torchweft.autograd.contexts import current_id, enter
from torchweft.protocol.calls import ServedCall


class Surroundings(NamedTuple):
    """The autograd context, the grad mode and the served call of a thread.

    A map continues, and its reducer runs, on any thread that an answer arrives on.
    """

    context_id: int
    is_grad_enabled: bool
    call: ServedCall | None

    @property
    def is_recorded(self) -> bool:
        """Whether calls in this state become part of a graph."""
        return bool(self.context_id) and self.is_grad_enabled

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Restores the state on this thread for a ``with`` block."""
        before = current_call.set(self.call)
        try:
            with enter(self.context_id), torch.set_grad_enabled(self.is_grad_enabled):
                yield
        finally:
            current_call.reset(before)


def surroundings() -> Surroundings:
    """Returns the ambient state of this thread."""
    return Surroundings(current_id(), torch.is_grad_enabled(), current_call.get())
