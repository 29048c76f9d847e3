"""Which values each stage takes, and from where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchweft.arguments import kind_of
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.pipeline.partition.text import aligned

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

    def describe(self) -> str:
        """Returns an aligned table: which values each stage takes, and from where."""
        rows = [[str(stage), self.text(stage)] for stage in range(len(self.takes))]
        return aligned(["stage", "takes"], rows, left=["takes"])

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
