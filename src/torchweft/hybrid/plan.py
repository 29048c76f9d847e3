"""Where each parameter of a model goes, and what a step of it sends; pure.

Errors, all of them before anything is moved::

    ConfigurationError
    ├── PlacementError    a parameter cannot be placed as requested
    └── TrainersDiffer    a trainer has another model, or was told something else
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchweft.columns import aligned
from torchweft.embedding import Plan, TableConfig, Wire, plan_tables
from torchweft.embedding.configs import Place
from torchweft.embedding.planner import shown_bytes
from torchweft.errors import ConfigurationError


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class PlacementError(ConfigurationError):
    """A parameter cannot be placed as requested; nothing was moved.

    Attributes:
        parameter: Name of the parameter, or of its module.
    """

    parameter: str = ""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class TrainersDiffer(ConfigurationError):
    """A trainer has another model than the first one, or other arguments; nothing was moved.

    Attributes:
        trainer: Name of the trainer.
        part: The part that differs: the name of a parameter, or of an argument.
    """

    trainer: str = ""
    part: str = ""


_NUMBERS = ("shape", "touched", "bytes/step", "all-gather")
_TITLES = ("parameter", "shape", "place", *_NUMBERS[1:], "reason")


@dataclass(frozen=True)
class Dense:
    """A parameter that each trainer has.

    Attributes:
        name: Its name in the module.
        shape: Its shape.
        size_bytes: Its size.
        reason: Why a table stays with the trainers; empty for other parameters.
    """

    name: str
    shape: tuple[int, ...]
    size_bytes: int
    reason: str = ""


@dataclass(frozen=True)
class HybridPlan:
    """The places of all parameters; printed as a table.

    Attributes:
        tables: The plan of the tables that could be on servers; the name of a table is its path in
            the module, with ``/`` in place of dots.
        dense: The parameters that each trainer has, without those tables.
        trainers: Number of trainers.
    """

    tables: Plan
    dense: tuple[Dense, ...]
    trainers: int

    @property
    def on_servers(self) -> Plan | None:
        """The plan of the tables that are on servers; None if there is none."""
        configs = [each for each in self.tables.configs if self.tables.placed[each.name].shards]
        if not configs:
            return None
        placed = {each.name: self.tables.placed[each.name] for each in configs}
        return Plan(tuple(configs), placed, self.trainers)

    @property
    def copied(self) -> tuple[TableConfig, ...]:
        """The tables that stay with the trainers."""
        return self.tables.copied

    @property
    def step_bytes(self) -> dict[str, int | None]:
        """What a step sends for each parameter, of all trainers; None if that is not known."""
        found = {
            parameter_of(each.name): self.tables.placed[each.name].step_bytes
            for each in self.tables.configs
        }
        return {**found, **{each.name: self._all_reduced(each.size_bytes) for each in self.dense}}

    def __str__(self) -> str:
        """Returns a line for each table, and one for all other parameters."""
        lines = [_TITLES, *map(self._table_line, self.tables.configs), *self._dense_lines()]
        shown = "\n".join(aligned(lines, [title not in _NUMBERS for title in _TITLES]))
        count = "1 trainer" if self.trainers == 1 else f"{self.trainers} trainers"
        return f"{shown}\n{count}; bytes of all of them, without headers"

    def _table_line(self, config: TableConfig) -> tuple[str, ...]:
        placed = self.tables.placed[config.name]
        servers = dict.fromkeys(shard.server for shard in placed.shards)
        return (
            parameter_of(config.name),
            f"{config.rows:,} x {config.dim}",
            ", ".join(servers) if servers else "replicas",
            "?" if placed.touched is None else f"{placed.touched:.2%}",
            shown_bytes(placed.step_bytes),
            shown_bytes(placed.gather_bytes),
            placed.reason,
        )

    def _dense_lines(self) -> list[tuple[str, ...]]:
        lines = [
            self._dense_line([each], each.name, each.reason) for each in self.dense if each.reason
        ]
        others = [each for each in self.dense if not each.reason]
        if others:
            name = others[0].name if len(others) == 1 else f"{len(others)} others"
            lines.append(self._dense_line(others, name, "dense: used as a whole"))
        return lines

    def _dense_line(self, parts: Sequence[Dense], name: str, reason: str) -> tuple[str, ...]:
        sent = sum(self._all_reduced(each.size_bytes) for each in parts)
        shape = " x ".join(f"{each:,}" for each in parts[0].shape) if len(parts) == 1 else ""
        return name, shape, "replicas", "", f"{sent:,}", "", reason

    def _all_reduced(self, size_bytes: int) -> int:
        return 2 * (self.trainers - 1) * size_bytes


def parameter_of(table: str) -> str:
    """Returns the name of the parameter that a table was in the module."""
    return f"{table.replace('/', '.')}.weight"


def make_plan(
    configs: Iterable[TableConfig],
    dense: Iterable[Dense],
    servers: Sequence[str],
    *,
    trainers: int | Sequence[str],
    touched: Mapping[str, float],
    places: Mapping[str, Place],
    wire: Wire = Wire(),  # noqa: B008  # immutable
) -> HybridPlan:
    """Decides where each parameter goes: sparse ones to servers, dense ones to all trainers.

    Args:
        configs: The tables.
        dense: All other parameters.
        servers: Names of the workers that hold rows.
        trainers: Number of trainers, or their names; see ``torchweft.embedding.plan_tables``.
        touched: Share of its rows that a trainer touches in a step, by table.
        places: Places that are decided already, by table.
        wire: The form of values in messages.

    Raises:
        PlacementError: A table is to go to servers, and none is named.
        PlanError: A table cannot be placed as requested.
    """
    found = tuple(configs)
    if not servers:
        for config in found:
            if config.name not in places:
                raise PlacementError(
                    "no server is named, so no table can go there; pass servers=[...], or "
                    f"places={{...: Copies()}} for {parameter_of(config.name)!r} too",
                    parameter=parameter_of(config.name),
                )
    count = trainers if isinstance(trainers, int) else len(trainers)
    if not found:
        plan = Plan((), {}, count)
    else:
        plan = plan_tables(
            found,
            servers,
            trainers=trainers,
            touched=touched,
            places=places,
            wire=wire,
        )
    return HybridPlan(plan, tuple(dense), count)
