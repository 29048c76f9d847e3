"""Checks the options of ``Tables`` before anything is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchweft.arguments import check_type
from torchweft.embedding.cache import Cache
from torchweft.embedding.errors import PlanError
from torchweft.embedding.plan import Plan
from torchweft.embedding.rules import Rule
from torchweft.embedding.wire import Wire
from torchweft.errors import ConfigurationError


def check_types(*, name: Any, seed: Any, cache: Any, wire: Any) -> None:
    """Checks the types of options of ``Tables`` that a ``HybridModel`` has, too.

    Raises:
        ArgumentTypeError: One is of a wrong type.
    """
    check_type(name, str, "name", "a name of the tables")
    check_type(seed, int, "seed", "an integer")
    if cache is not None:
        check_type(cache, Cache, "cache", "a Cache, such as Cache(0.1), or None")
    check_type(wire, Wire, "wire", "a Wire, such as Wire('fp16', 'fp16')")


def check_options(trainers: Sequence[str], staleness: int | None, reduction: str) -> None:
    """Checks options of ``Tables``.

    Raises:
        ConfigurationError: One of them cannot work.
    """
    if not trainers or len(set(trainers)) < len(trainers):
        raise ConfigurationError(f"trainers is {list(trainers)}; name each trainer once")
    if staleness is not None and (type(staleness) is not int or staleness < 0):
        raise ConfigurationError(
            f"staleness is {staleness!r}; pass a number of steps, or None for the asynchronous mode"
        )
    if reduction not in ("mean", "sum"):
        raise ConfigurationError(f"reduction is {reduction!r}; use 'mean' or 'sum'")


def check_cache(cache: Cache, plan: Plan, staleness: int | None, *, is_trainer: bool) -> None:
    """Checks that rows can be kept in a cache.

    Raises:
        ConfigurationError: They cannot.
    """
    if not is_trainer:
        raise ConfigurationError(
            "this worker is not among the trainers, so it has no steps after which cached rows are "
            "pulled again; make the tables without a cache"
        )
    if staleness is None and cache.steps is None:
        raise ConfigurationError(
            "in the asynchronous mode a cache needs a limit of its own, such as Cache(steps=8)"
        )
    if staleness is not None and cache.steps is not None:
        raise ConfigurationError(
            f"a cache has steps={cache.steps}, and the tables staleness={staleness}, which limits "
            "the cache; leave steps out"
        )
    for stack in plan.layout.stacks:
        if stack.is_dynamic:
            raise ConfigurationError(
                f"table {stack.members[0].config.name!r} has dynamic ids, and a cache finds "
                "rows by numbers; make the tables without a cache, or dynamic tables apart"
            )


def check_ahead(name: str, cache: Cache, staleness: int | None, ahead: int) -> None:
    """Checks that cached rows of trained tables can be young enough if they are pulled ahead.

    Raises:
        ConfigurationError: They cannot.
    """
    if staleness is not None and ahead > staleness:
        raise ConfigurationError(
            f"tables {name!r} have staleness={staleness} and a cache, and rows that are "
            f"pulled {ahead} steps ahead are older; pass at most ahead={staleness}, or make the "
            f"tables with staleness={ahead}, or without a cache"
        )
    if staleness is None and cache.steps is not None and ahead > cache.steps:
        raise ConfigurationError(
            f"the cache of tables {name!r} has steps={cache.steps}, and rows that are pulled "
            f"{ahead} steps ahead are older; pass at most ahead={cache.steps}, or "
            f"Cache(steps={ahead})"
        )


def check_rule(rule: Rule, plan: Plan) -> None:
    """Checks that the tables of a plan can have an optimizer.

    Raises:
        PlanError: A table is cut by column, and the optimizer needs whole rows.
        ArgumentTypeError: The rule is none.
    """
    check_type(rule, Rule, "rule", "a rule of torchweft.embedding, such as Adagrad(lr=0.1)")
    for stack in plan.layout.stacks:
        for member in stack.members:
            if rule.needs_whole_rows and len(member.columns) < member.config.dim:
                raise PlanError(
                    f"table {member.config.name!r} is cut by column, and "
                    f"{type(rule).__name__} needs whole rows; cut it by row, or use Adagrad",
                    table=member.config.name,
                )
