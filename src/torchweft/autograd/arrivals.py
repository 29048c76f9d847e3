"""Tensors with a graph at their sender that travel outside of autograd contexts.

Such a tensor was *computed*: it requires grad at its sender and is no leaf. The local engine knows
nothing of that graph, so a pass that it runs into the tensor would lose the gradient without a
word. The tensor can be used like any other. But it is marked: a pass that ends in it raises, and
says what to write; ``torchweft.autograd.backward`` goes on at the sender. A leaf of the sender is
a leaf here, too, of its own.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Parameter

from torchweft.autograd.outside import OutsideRecords
from torchweft.autograd.placeholders import make_placeholders
from torchweft.errors import AutogradError

NO_GRAD = (1 << 64) - 1
"""In the place of a context's number: the caller wants no graph of the arguments and the result."""


class Arrivals:
    """Makes such tensors ready for the program, on one worker. Thread-safe.

    Args:
        records: What the worker records of them.
        warns: Whether nothing is recorded, a tensor becomes a leaf, as in
            ``torch.distributed.rpc``, and the first pass that ends in one is answered with a
            warning instead of an error.
    """

    def __init__(self, records: OutsideRecords, warns: bool = False) -> None:
        self._records = records
        self._warns = warns
        self._has_warned = False

    @property
    def no_grad_id(self) -> int:
        """What a call under ``torch.no_grad`` says in the place of its context."""
        # There, what comes back requires grad whatever the mode of the caller is.
        return 0 if self._warns else NO_GRAD

    @property
    def keeps_graphs(self) -> bool:
        """Whether gradients outside of contexts are to go back to where they belong."""
        return not self._warns

    def place(
        self,
        values: list[Any],
        computed: Sequence[int],
        sender: str,
        worker: int,
        context_id: int,
        message_id: int,
    ) -> None:
        """Puts tensors for the program in the place of those that were received.

        Args:
            values: What was received, all tensors as leaves.
            computed: Where in it the tensors are that have a graph at the sender.
            sender: The name of the worker that sent them.
            worker: Its rank.
            context_id: What the call said of its context: under ``torch.no_grad`` they are
                constants.
            message_id: Under which number the sender has recorded the message; 0 where it has not.
        """
        if context_id:  # It was recorded in a context that is over.
            message_id = 0
        if context_id == NO_GRAD:
            for place in computed:
                values[place].requires_grad_(False)
        elif self._warns:
            if message_id:
                self._records.give_back(worker, message_id)
            for place in computed:
                self._mark_leaf(values[place], sender)
        elif computed:
            tensors = [values[place] for place in computed]
            nodes, placeholders = make_placeholders(tensors)
            if message_id:
                self._records.place_received(message_id, worker, placeholders, nodes)
            for node in nodes:
                node.register_prehook(functools.partial(_refuse, sender, bool(message_id)))
            for place, tensor, placeholder in zip(computed, tensors, placeholders, strict=True):
                if isinstance(tensor, Parameter):
                    placeholder._is_param = True  # for isinstance
                values[place] = placeholder

    def _mark_leaf(self, tensor: Tensor, sender: str) -> None:
        def warn(_: object) -> None:
            if not self._has_warned:
                self._has_warned = True
                text = (
                    f"backward ended in a tensor that worker {sender!r} had computed outside of an "
                    "autograd context, so its gradient does not go back there; make the call "
                    "within a context, or detach() the tensor if it is meant to be a constant"
                )
                warnings.warn(text, RuntimeWarning, stacklevel=2)

        warn.__torch_unserializable__ = True  # type: ignore[attr-defined]  # and says nothing of it
        tensor.requires_grad_().register_hook(warn)  # type: ignore[no-untyped-call]


def _refuse(sender: str, is_recorded: bool, _: object) -> NoReturn:
    if is_recorded:
        raise AutogradError(
            f"this backward pass does not go on at worker {sender!r}, which had computed a tensor "
            "that it has reached: call torchweft.autograd.backward(loss) instead of "
            "loss.backward(), or detach() the tensor if it is meant to be a constant",
            worker=sender,
        )
    raise AutogradError(
        f"backward ended in a tensor that worker {sender!r} had computed, and had recorded "
        "nowhere, or in a context that is over by now. Make the call within `with "
        "torchweft.autograd.context() as context_id:`, and call backward(context_id, [loss]) "
        "there; or detach() the tensor if it is meant to be a constant",
        worker=sender,
    )
