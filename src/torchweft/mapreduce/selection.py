"""Decorators that run a function on some of the workers only.

The rank is looked up at each call. So a function may be decorated before its process joins a
group, and in a remote call the rank of the called worker decides.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.mapreduce.identity import get_world_rank

P = ParamSpec("P")
T = TypeVar("T")
Selected = Callable[[Callable[P, T]], Callable[P, "T | None"]]


def on_rank(*ranks: int) -> Selected[P, T]:
    """Returns a decorator: the function runs on these workers, and returns None on all others.

    Args:
        ranks: Ranks of workers, from 0; the workers need not exist. Negative ranks do not count
            from the end: -1 is refused.

    Raises:
        ArgumentTypeError: A rank is not an integer: a function, for instance, if the parentheses
            are missing.
        ConfigurationError: A rank is negative.
    """
    chosen = _checked("on_rank", ranks)
    return lambda function: _selective(function, lambda rank: rank in chosen)


def not_on_rank(*ranks: int) -> Selected[P, T]:
    """Returns a decorator: the function runs on all other workers, and returns None on these.

    Args:
        ranks: As for ``on_rank``.

    Raises:
        ArgumentTypeError: A rank is not an integer.
        ConfigurationError: A rank is negative.
    """
    excluded = _checked("not_on_rank", ranks)
    return lambda function: _selective(function, lambda rank: rank not in excluded)


def rank_all(function: Callable[P, T]) -> Callable[P, T]:
    """Returns the function unchanged: it runs on all workers."""
    return function


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Has a function run on the worker of rank 0 only, and return None on all others.

    Raises:
        ArgumentTypeError: ``function`` is not callable.
    """
    return _selective(function, lambda rank: rank == 0)


def rank_non_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Has a function run on all workers except rank 0, where it returns None.

    Raises:
        ArgumentTypeError: ``function`` is not callable.
    """
    return _selective(function, lambda rank: rank != 0)


def _selective(
    function: Callable[P, T], is_selected: Callable[[int], bool]
) -> Callable[P, T | None]:
    if not callable(function):
        raise ArgumentTypeError(
            f"a function is to run on some workers only, and {function!r} is none"
        )

    @functools.wraps(function)
    def run_where_selected(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if is_selected(get_world_rank()) else None

    return run_where_selected


def _checked(decorator: str, ranks: tuple[Any, ...]) -> frozenset[int]:
    for rank in ranks:
        if not hasattr(rank, "__index__"):
            like = f"; write @{decorator}(0) above a function" if callable(rank) else ""
            raise ArgumentTypeError(
                f"{decorator} takes ranks, each an integer of its own, and {rank!r} is none{like}"
            )
        if rank < 0:
            raise ConfigurationError(
                f"{decorator} was given rank {rank}; ranks go from 0 on, and are not counted from "
                "the end"
            )
    return frozenset(map(operator.index, ranks))
