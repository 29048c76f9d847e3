"""Weights that exist more than once: tied weights of several stages, and replicas of a stage.

Each copy gets the sum of all copies' gradients, added in one order everywhere. So copies that began
equal, and whose optimizers are alike, stay equal bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from torchweft.errors import ConfigurationError
from torchweft.pipeline.schedules import Table

Tie = tuple[tuple[int, str], ...]
"""A weight of several stages: the number of each stage and the weight's name there."""


class CopyHolder(NamedTuple):
    """A worker's part of a group of copies.

    Attributes:
        worker: The worker's row.
        stage: The stage.
        names: The names of the weights; None for all weights of the stage that are not tied.
    """

    worker: int
    stage: int
    names: tuple[str, ...] | None


class WeightCopies(NamedTuple):
    """All groups of copies in a pipeline.

    Attributes:
        groups: The members of each group, in the order in which gradients are added.
        tied: By stage, the names of its tied weights.
    """

    groups: tuple[tuple[CopyHolder, ...], ...]
    tied: Mapping[int, frozenset[str]]

    def workers(self, group: int) -> tuple[int, ...]:
        """Returns the workers of a group, each once."""
        return tuple(dict.fromkeys(member.worker for member in self.groups[group]))

    def weights(self, member: CopyHolder, module: nn.Module) -> list[Tensor]:
        """Returns a member's weights, in the same order for all members of its group."""
        if member.names is not None:
            return [module.get_parameter(name) for name in member.names]
        tied = self.tied.get(member.stage, frozenset())
        return [each for name, each in module.named_parameters() if name not in tied]

    def is_first(self, worker: int, stage: int, name: str) -> bool:
        """Whether this copy of a weight is the one that counts where each counts once."""
        is_tied = name in self.tied.get(stage, ())
        for group in self.groups:
            names = {member.stage: member.names for member in group}
            if stage in names and (
                name in (names[stage] or ()) if is_tied else names[stage] is None
            ):
                return (group[0].worker, group[0].stage) == (worker, stage)
        return True


def find_copies(table: Table, ties: Iterable[Tie]) -> WeightCopies:
    """Returns the groups of copies in a pipeline.

    Raises:
        ConfigurationError: A tie names a stage that does not exist, or fewer than two weights.
    """
    holders = {
        stage: [worker for worker in range(len(table.rows)) if stage in table.stages_of(worker)]
        for stage in range(table.n_stages)
    }
    groups: list[tuple[CopyHolder, ...]] = []
    tied: dict[int, set[str]] = {}
    for tie in ties:
        if len(tie) < 2:
            raise ConfigurationError(f"the tie {tie!r} has one weight; name at least two")
        for stage, name in tie:
            if stage not in holders:
                raise ConfigurationError(
                    f"the tie {tie!r} names stage {stage}; there are the stages 0 to "
                    f"{table.n_stages - 1}"
                )
            tied.setdefault(stage, set()).add(name)
        groups.append(
            tuple(
                CopyHolder(worker, stage, (name,))
                for stage, name in tie
                for worker in holders[stage]
            )
        )
    for stage, workers in holders.items():
        if len(workers) > 1:
            groups.append(tuple(CopyHolder(worker, stage, None) for worker in workers))
    return WeightCopies(tuple(groups), {stage: frozenset(names) for stage, names in tied.items()})


def separated(
    sources: Mapping[int, Callable[[], nn.Module] | nn.Module],
) -> dict[int, Callable[[], nn.Module] | nn.Module]:
    """Returns the stages of one worker, no two of which hold the same weight or buffer.

    Stages that travel in one message still share their tied weights when they arrive. As one tensor
    with one gradient, it would count once for each stage in the sum over copies.
    """
    seen: set[int] = set()
    found = dict(sources)
    for stage, source in sources.items():
        if not isinstance(source, nn.Module):
            continue
        if not seen.isdisjoint(map(id, (*source.parameters(), *source.buffers()))):
            found[stage] = source = copy.deepcopy(source)
        seen.update(map(id, (*source.parameters(), *source.buffers())))
    return found


def added(gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Returns the sums of several members' gradients, in the order of the members."""
    totals: list[Tensor | None] = []
    for column in zip(*gradients, strict=True):
        total: Tensor | None = None
        for each in column:
            if each is not None:
                total = each if total is None else total + each
        totals.append(total)
    return totals
