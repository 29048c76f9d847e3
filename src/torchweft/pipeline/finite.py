"""A stage that checks its results, to find where values become NaN or infinite.

A stage checks what it made before it is sent. So the first stage with bad results raises, and the
others get none of them. Only two kinds of bad values reach a stage: those of the batch, and
infinities in values that need no gradient. The latter are let through, because masks have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from torchweft.extending import Member
from torchweft.pipeline.errors import NotFinite
from torchweft.pipeline.stage import Leaves, StageRun
from torchweft.pipeline.wiring import BATCH, Packet, describe


class BadElements(NamedTuple):
    """How many elements of a tensor are not finite."""

    n_nan: int
    n_infinite: int
    tensor: Tensor

    def __str__(self) -> str:
        total = self.tensor.numel()
        shown = describe(self.tensor)
        return f"{self.n_nan} NaN and {self.n_infinite} infinite of {total} elements ({shown})"


def not_finite(values: Sequence[Any], strict: int = -1) -> BadElements | None:
    """Returns the first tensor that has elements which are not finite.

    Args:
        values: Tensors and other objects.
        strict: Bit *i* says whether an infinite element of value *i* counts; NaN always counts.
    """
    for place, value in enumerate(values):
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        elements = _elements(value)
        n_bad = int((~torch.isfinite(elements)).sum())
        n_nan = int(torch.isnan(elements).sum()) if n_bad else 0
        if n_nan or (n_bad and strict >> place & 1):
            return BadElements(n_nan, n_bad - n_nan, value)
    return None


def _elements(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor._values()
    return tensor.float() if tensor.itemsize == 1 else tensor  # float8 has no isfinite


class CheckedStage(StageRun):
    """Runs one stage, and checks its results.

    Args:
        args: Those of ``StageRun``.
        unit: The name, in messages, of that which goes through the stages.
        worker: The name of its worker.
        peer_of: Returns the worker that runs a stage for a micro-batch.
    """

    def __init__(
        self, *args: Any, unit: str, worker: str, peer_of: Callable[[int, int], Member]
    ) -> None:
        super().__init__(*args)
        self._unit = unit
        self._worker = worker
        self._peer_of = peer_of
        self._microbatch = -1
        self._packets: Mapping[int, Packet] = {}
        self._weights: Leaves = {}

    def forward(
        self,
        microbatch: int,
        packets: Mapping[int, Packet],
        target: Any = None,
        weights: Leaves | None = None,
    ) -> tuple[dict[int, Packet], Tensor | None]:
        """Runs a forward, and checks the packets and the loss."""
        self._microbatch, self._packets = microbatch, packets
        self._weights = dict(self.module.named_parameters()) if weights is None else weights
        outgoing, loss = super().forward(microbatch, packets, target, weights)
        for consumer, packet in outgoing.items():
            found = not_finite(packet.leaves, packet.mask)
            if found is not None:
                raise self._of_forward(f"output for stage {consumer}", found)
        self._packets, self._weights = {}, {}
        return outgoing, loss

    def _run(
        self, arguments: Sequence[Any], weights: Leaves | None, target: Any
    ) -> tuple[Any, Tensor | None]:
        output, loss = super()._run(arguments, weights, target)
        found = None if loss is None else not_finite([loss])
        if found is not None:
            inside = not_finite(_pytree.tree_leaves(output))
            raise self._of_forward("output" if inside else "loss", inside or found)
        return output, loss

    def _of_forward(self, value: str, found: BadElements) -> NotFinite:
        """Returns the error of a forward: that of its inputs or weights, if they are not finite."""
        result = f"the {value} of stage {self.stage}"
        for source, packet in self._packets.items():
            given = not_finite(packet.leaves)
            if given is not None and source == BATCH:
                more = f"; {result} is the first result that is not finite"
                return self._error("input from the batch", given, more=more)
            if given is not None:
                more = f"; with them, {result} has {found}"
                return self._error(f"output for stage {self.stage}", given, source, more=more)
        for name, weight in self._weights.items():
            bad = not_finite([weight])
            if bad is not None:
                return self._error(
                    f"weight {name!r}", bad, more=" before it; its inputs are finite"
                )
        return self._error(value, found, more="; its inputs and weights are finite")

    def backward(
        self, microbatch: int, gradients: Mapping[int, Sequence[Tensor | None]]
    ) -> dict[int, list[Tensor | None]]:
        """Runs a whole backward, and checks the gradients for the sources."""
        self._microbatch = microbatch
        return self._checked(super().backward(microbatch, gradients), "backward")

    def backward_input(
        self, microbatch: int, gradients: Mapping[int, Sequence[Tensor | None]]
    ) -> dict[int, list[Tensor | None]]:
        """Runs the first part of a backward, and checks the gradients for the sources."""
        self._microbatch = microbatch
        found = super().backward_input(microbatch, gradients)
        return self._checked(found, "backward to the inputs")

    def _checked(
        self, gradients: dict[int, list[Tensor | None]], action: str
    ) -> dict[int, list[Tensor | None]]:
        for source, each in gradients.items():
            found = not_finite(each)
            if found is not None:
                more = "; the gradients that it was given are finite"
                raise self._error(f"gradient for stage {source}", found, action=action, more=more)
        return gradients

    def check_weights(self, microbatch: int = -1) -> None:
        """Checks the gradients of its weights."""
        self._microbatch = microbatch
        for name, weight in self.module.named_parameters():
            found = None if weight.grad is None else not_finite([weight.grad])
            if found is not None:
                action = "backward" if microbatch < 0 else "update"
                raise self._error(f"gradient of weight {name!r}", found, action=action)

    def _error(
        self,
        value: str,
        found: BadElements,
        source: int | None = None,
        *,
        action: str = "forward",
        more: str = "",
    ) -> NotFinite:
        """Returns the error of this stage, or of the one that sent it the value."""
        at = self._microbatch
        stage, worker = self.stage, self._worker
        if source is not None:
            stage, worker = source, self._peer_of(source, at).name
        where = f"{action} of {'the whole step' if at < 0 else f'{self._unit} {at}'}"
        return NotFinite(
            f"stage {stage} on worker {worker!r}, {where}: its {value} has {found}{more}",
            stage=stage,
            worker=worker,
            microbatch=at,
            action=action,
            value=value,
            n_nan=found.n_nan,
            n_infinite=found.n_infinite,
        )
