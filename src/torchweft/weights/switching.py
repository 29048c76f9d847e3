"""Puts the tensors of a version into a module, between two of its batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchweft.weights.errors import WeightsMismatch


class Switch(NamedTuple):
    """A prepared change of a state to a version.

    Attributes:
        swaps: Parameters, and the memory that they are to use.
        copies: Tensors that keep their memory, and their new values.
    """

    swaps: list[tuple[Tensor, Tensor]]
    copies: list[tuple[Tensor, Tensor]]

    def run(self) -> BaseException | None:
        """Makes the whole change, also when it is interrupted; returns the interrupt."""
        try:
            self._run()
        except BaseException as interrupt:
            self._run()  # Nothing is left half way: all steps can be repeated.
            return interrupt
        return None

    def _run(self) -> None:
        # Tensors that were made in this mode can be written only in it, and others in it as well.
        with torch.inference_mode():
            for target, value in self.copies:
                target.copy_(value)
            for target, value in self.swaps:
                target.data = value


def prepare(
    targets: Mapping[str, Tensor], values: Mapping[str, Tensor], *, in_place: bool
) -> Switch:
    """Returns the change of a state to new values.

    Parameters on the CPU take the memory of the values. Buffers, which a module may write, tensors
    of a dict, those that were made in inference mode, and those on other devices keep theirs.

    Raises:
        WeightsMismatch: Two names are one tensor here, and their values differ.
    """
    swaps: list[tuple[Tensor, Tensor]] = []
    copies: list[tuple[Tensor, Tensor]] = []
    firsts: dict[int, str] = {}
    for name, target in targets.items():
        first = firsts.setdefault(id(target), name)
        if first != name:
            if not _is_equal(values[first], values[name]):
                raise WeightsMismatch(
                    f"{first!r} and {name!r} are one tensor of the subscriber, and have different "
                    "values at the publisher; publisher and subscriber need the same model",
                    tensor=name,
                )
            continue
        is_swapped = not in_place and isinstance(target, nn.Parameter)
        is_swapped = is_swapped and target.device == values[name].device
        is_swapped = is_swapped and not target.is_inference()  # It would be of both modes then.
        (swaps if is_swapped else copies).append((target, values[name]))
    return Switch(swaps, copies)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors have the same bytes."""
    if one.data_ptr() == other.data_ptr():
        return True
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
