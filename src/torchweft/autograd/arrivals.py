"""Received tensors that have a graph at their sender but belong to no autograd context.

Such a tensor was *computed*: it requires grad at its sender and is not a leaf. The local engine
does not know that graph, so a local pass that reaches the tensor would silently lose the gradient.
The tensor can be used like any other, but it is marked: a local pass that reaches it raises an
error that names the remedy. ``torchweft.autograd.backward`` continues at the sender. A leaf of the
sender arrives as a separate leaf.
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
"""Sent in place of a context's number: the caller wants no graph of arguments and result."""


class Arrivals:
    """Prepares such tensors for the program, on one worker. Thread-safe.

    Args:
        records: The worker's records of messages outside of contexts.
        warns: Whether to record nothing and make each tensor a leaf, as in
            ``torch.distributed.rpc``. The first pass that ends in such a leaf then warns instead
            of raising.
    """

    def __init__(self, records: OutsideRecords, warns: bool = False) -> None:
        self._records = records
        self._warns = warns
        self._has_warned = False

    @property
    def no_grad_id(self) -> int:
        """The value that a call under ``torch.no_grad`` sends in place of its context's number."""
        # As in ``torch.distributed.rpc``, results require grad whatever the caller's grad mode.
        return 0 if self._warns else NO_GRAD

    @property
    def keeps_graphs(self) -> bool:
        """Whether gradients outside of contexts go back to the senders."""
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
        """Replaces received tensors by tensors for the program, in place.

        Args:
            values: The received values, all tensors as leaves.
            computed: Positions in ``values`` of the tensors that have a graph at the sender.
            sender: The name of the worker that sent them.
            worker: Its rank.
            context_id: The context that the call named; with ``NO_GRAD`` the tensors become
                constants.
            message_id: The number of the sender's record of the message; 0 if it has none.
        """
        if context_id:  # Its record belonged to a context that has ended.
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
