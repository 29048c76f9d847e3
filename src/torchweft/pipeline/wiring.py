"""The values between stages: which each stage takes, and from where; and how they are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree

from torchweft.arguments import kind_of
from torchweft.errors import ArgumentTypeError, ConfigurationError

BATCH = -1
"""The source that stands for the batch, as it was passed to the pipeline."""


class Take(NamedTuple):
    """One argument of a stage.

    Attributes:
        source: The stage whose output it is, or ``BATCH``.
        key: Which part of a tuple or dict; None for the whole output.
        name: The keyword under which the stage gets it; empty for a positional argument.
    """

    source: int
    key: int | str | None = None
    name: str = ""


@dataclass(frozen=True)
class Wiring:
    """The values that go between the stages of one pipeline.

    Attributes:
        takes: For each stage, its arguments in order.
        spreads: Whether a stage with one whole value takes it apart: a tuple into positional
            arguments, a dict into keyword arguments.
    """

    takes: tuple[tuple[Take, ...], ...]
    spreads: bool = True

    @classmethod
    def chain(cls, n_stages: int, *, spreads: bool) -> Wiring:
        """Returns the wiring in which each stage takes the whole output of the one before it."""
        return cls(tuple((Take(stage - 1),) for stage in range(n_stages)), spreads)

    @classmethod
    def checked(cls, takes: Sequence[Sequence[Take | int]]) -> Wiring:
        """Returns the wiring with these arguments of each stage.

        Raises:
            ArgumentTypeError: An argument is neither a ``Take`` nor the number of a stage.
            ConfigurationError: A stage takes nothing, takes the output of itself or of a later
                stage, or its output is not used.
        """
        wiring = cls(
            tuple(
                tuple(_take(each, stage) for each in each_stage)
                for stage, each_stage in enumerate(takes)
            )
        )
        last = len(wiring.takes) - 1
        for stage, each_stage in enumerate(wiring.takes):
            if not each_stage:
                raise ConfigurationError(
                    f"stage {stage} takes no value; give it the batch or the output of a stage "
                    "before it"
                )
            for take in each_stage:
                if not BATCH <= take.source < stage:
                    raise ConfigurationError(
                        f"stage {stage} takes a value of stage {take.source}; a stage can take the "
                        f"batch ({BATCH}) and outputs of stages before it, 0 to {stage - 1}"
                    )
            if stage < last and not wiring.consumers(stage):
                raise ConfigurationError(
                    f"no stage takes the output of stage {stage}; only the last stage, {last}, "
                    "ends the pipeline"
                )
        return wiring

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The pairs of stages between which values go, each once."""
        return tuple(
            (source, stage) for stage in range(len(self.takes)) for source in self.sources(stage)
        )

    def sources(self, stage: int) -> tuple[int, ...]:
        """Returns the stages whose outputs ``stage`` takes, each once."""
        found = {take.source for take in self.takes[stage]} - {BATCH}
        return tuple(sorted(found))

    def consumers(self, stage: int) -> tuple[int, ...]:
        """Returns the stages that take outputs of ``stage``."""
        return tuple(each for each in range(len(self.takes)) if stage in self.sources(each))

    def taken(self, stage: int, source: int) -> tuple[Take, ...]:
        """Returns the arguments that ``stage`` takes from ``source``, in order."""
        return tuple(take for take in self.takes[stage] if take.source == source)

    def text(self, stage: int) -> str:
        """Returns the values that a stage takes as text: ``hidden, cos from stage 0``."""
        shown = []
        for source in dict.fromkeys(take.source for take in self.takes[stage]):
            keys = [
                "all" if take.key is None else str(take.key) for take in self.taken(stage, source)
            ]
            place = "the batch" if source == BATCH else f"stage {source}"
            shown.append(f"{', '.join(keys)} from {place}")
        return "; ".join(shown)


def _take(value: object, stage: int) -> Take:
    if isinstance(value, Take):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Take(value)
    raise ArgumentTypeError(
        f"an argument of stage {stage} is {kind_of(value)}; pass the number of a stage, BATCH, or "
        "a Take"
    )


# As they are sent


class Packet(NamedTuple):
    """The values that one stage takes from another, as they are sent.

    Attributes:
        mask: Bit *i* says that leaf *i* needs a gradient.
        structure: The values with the places of leaves in their stead; None for one tensor alone.
        leaves: Tensors, detached, and other objects.
    """

    mask: int
    structure: Any
    leaves: Sequence[Any]

    def require_grad(self) -> list[Tensor]:
        """Returns the leaves that need a gradient, in order; from now on they require it."""
        mask, leaves = self.mask, self.leaves
        if not mask:
            return []
        return [leaf.requires_grad_() for place, leaf in enumerate(leaves) if mask >> place & 1]

    def values(self) -> Any:
        """Returns the values, one for each ``Take``."""
        if self.structure is None:
            return self.leaves
        return _pytree.tree_map(self.leaves.__getitem__, self.structure)


def pick(output: Any, take: Take, stage: int) -> Any:
    """Returns the part of a stage's output that another stage takes.

    Raises:
        ConfigurationError: The output has no such part.
    """
    if take.key is None:
        return output
    try:
        return output[take.key]
    except (KeyError, IndexError, TypeError):
        raise ConfigurationError(
            f"stage {stage} takes part {take.key!r} of the output of stage {take.source}, which is "
            f"{describe(output)}"
        ) from None


def make_packet(values: Sequence[Any], *, may_need_grad: bool) -> tuple[Packet, list[Tensor]]:
    """Returns values as they are sent, and their tensors that need a gradient, not detached.

    Args:
        values: The values.
        may_need_grad: Whether a tensor without a graph counts as one that needs a gradient: the
            graph of a checkpointed stage is made later.
    """
    leaves: Sequence[Any]
    structure = None
    if len(values) == 1 and isinstance(values[0], Tensor):
        leaves = values
    else:
        leaves, spec = _pytree.tree_flatten(tuple(values))
        structure = _pytree.tree_unflatten(range(len(leaves)), spec)
    mask, sent, needing = 0, [], []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad or (may_need_grad and leaf.is_floating_point()):
                mask |= 1 << place
                needing.append(leaf)
            leaf = leaf.detach()
        sent.append(leaf)
    return Packet(mask, structure, sent), needing


def describe_packets(packets: Mapping[int, Packet]) -> str:
    """Describes the values that a stage gets, by their source, for a message."""
    shown = []
    for source, packet in packets.items():
        place = "the batch" if source == BATCH else f"stage {source}"
        shown.append(f"{', '.join(map(describe, packet.leaves))} from {place}")
    return " and ".join(shown)


def describe(value: Any) -> str:
    """Describes a value for a message: types and shapes."""
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return f"{name}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        inside = ", ".join(map(describe, value))
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {describe(each)}" for key, each in value.items()) + "}"
    return type(value).__name__
