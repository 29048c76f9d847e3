"""Reducers: functions that combine the results of all parts of a map into one result.

The reducers in this file work on tensors, and on trees of tensors, leaf by leaf: a loss and
metrics, say. Numbers among the leaves stay numbers.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from torchweft import extending
from torchweft.errors import ReduceError
from torchweft.mapreduce import trees

Reducer = Callable[..., Any]


def mean_reducer(results: Iterable[Any], weights: Sequence[float] | None = None) -> Any:
    """Returns the mean of the results of a map.

    With ``weights``, a mean over parts of 2 and 3 samples, each the mean of its own samples, is the
    mean over all 5. A map passes the lengths of its parts.

    Args:
        results: Tensors of the same shape, of a floating-point or complex dtype; numbers; or trees
            of the same structure with these as leaves.
        weights: The weight of each result; None if all weights are equal.

    Returns:
        A tensor of that shape, dtype and device, a number, or a tree of these. Computed in
        ``float32`` if the dtype has less precision, and in the autograd graph.

    Raises:
        ReduceError: There are no results; they are of another type, or differ in shape or
            structure; or the weights do not fit them.
    """
    listed = tuple(results)
    used = None if weights is None or not listed else _differing(weights, len(listed))
    return _leaf_by_leaf("mean_reducer", listed, functools.partial(_mean, weights=used))


def sum_reducer(results: Iterable[Any]) -> Any:
    """Returns the sum of the results of a map.

    Args:
        results: Tensors of the same shape, numbers, or trees of the same structure with these as
            leaves.

    Returns:
        A tensor of that shape, a number, or a tree of these; in the autograd graph.

    Raises:
        ReduceError: There are no results; they are of another type, or differ in shape or
            structure.
    """
    return _leaf_by_leaf("sum_reducer", tuple(results), _sum)


def reduce(reducer: Reducer, results: Sequence[Any], weights: Sequence[float] | None) -> Any:
    """Hands the results of a map to its reducer.

    Args:
        reducer: A function of a list of results. If it has a parameter called ``weights``, it gets
            the lengths of the parts, too.
        results: The results, in the order of the parts.
        weights: The lengths of the parts; None if all are the same.

    Raises:
        ReduceError: The reducer raised the error that is its cause.
    """
    listed = list(results)
    options = {}
    if _takes_weights(reducer):
        options["weights"] = [1.0] * len(listed) if weights is None else list(weights)
    try:
        return reducer(listed, **options)
    except ReduceError:
        raise
    except Exception as error:
        advice = f"; {_unfit(listed)}" if _unfit(listed) else ""
        reason = f"{type(error).__name__}: {error}{advice}"
        raise _failed(extending.function_name(reducer), len(listed), reason) from error


def _leaf_by_leaf(
    name: str, results: tuple[Any, ...], put_together: Callable[[tuple[Any, ...]], Any]
) -> Any:
    """Combines the leaves that are at the same place in all results."""
    if not results:
        raise _failed(name, 0, "there must be one at least; were the tensors that were cut empty?")
    _, spec = trees.flatten(results[0])
    try:
        rows = [trees.flatten_as(spec, result) for result in results]
    except ValueError as error:
        reason = f"they differ in structure; return the same from every part. {error}"
        raise _failed(name, len(results), reason) from error
    reduced = []
    for index, column in enumerate(zip(*rows, strict=True)):
        try:
            reduced.append(put_together(column))
        except (TypeError, ValueError, RuntimeError) as error:
            path = trees.paths(results[0])[index]
            reason = f"those at {path}: {error}" if path else str(error)
            raise _failed(name, len(results), reason) from error
    return trees.unflatten(reduced, spec)


def _mean(column: tuple[Any, ...], weights: list[float] | None) -> Any:
    if _are_numbers(column):
        factors = [1.0] * len(column) if weights is None else weights
        total = sum(value * factor for value, factor in zip(column, factors, strict=True))
        return total / sum(factors)
    stacked = _stacked(column)
    dtype = stacked.dtype
    if not dtype.is_floating_point and not dtype.is_complex:
        raise TypeError(f"tensors of {dtype} have no mean; return .float(), or use sum_reducer")
    if weights is None:
        return torch.mean(stacked, dim=0)
    working = torch.promote_types(dtype, torch.float32)
    factor = torch.tensor(weights, dtype=working, device=stacked.device)
    factor = factor.view(-1, *[1] * (stacked.dim() - 1))
    return (torch.sum(stacked * factor, dim=0) / sum(weights)).to(dtype)


def _sum(column: tuple[Any, ...]) -> Any:
    return sum(column) if _are_numbers(column) else torch.sum(_stacked(column), dim=0)


def _are_numbers(column: tuple[Any, ...]) -> bool:
    return all(isinstance(leaf, Number) for leaf in column)


def _stacked(column: tuple[Any, ...]) -> Tensor:
    advice = _unfit(column)
    if advice:
        raise TypeError(advice)
    place = column[0].device  # Parts that ran on several GPUs are put together on the first.
    return torch.stack([leaf.to(place) for leaf in column], dim=0)


def _unfit(results: Sequence[Any]) -> str:
    """Returns why results are not tensors of one shape, with advice; empty if they are."""
    kinds = {type(result).__name__: None for result in results if not isinstance(result, Tensor)}
    if kinds:
        return (
            f"some are of type {', '.join(kinds)}; return tensors, numbers, or tuples, lists and "
            "dicts of them from every part, and reduce these by mean_reducer or sum_reducer"
        )
    shapes = {str(tuple(result.shape)): None for result in results}
    if len(shapes) > 1:
        return (
            f"they are of shapes {', '.join(shapes)}; return the same shape whatever the length of "
            "the part, such as a mean over its samples, or join them by reducer=torch.cat"
        )
    return ""


def _differing(weights: Sequence[float], count: int) -> list[float] | None:
    """Returns the weights of ``count`` results; None if all are the same."""
    listed = [float(weight) for weight in weights]
    if len(listed) != count:
        reason = f"there are {len(listed)} weights; pass one for each result"
        raise _failed("mean_reducer", count, reason)
    if min(listed) < 0 or not 0 < sum(listed) < math.inf:
        reason = f"the weights are {listed}; pass lengths of parts, one of them at least not 0"
        raise _failed("mean_reducer", count, reason)
    return listed if len(set(listed)) > 1 else None


def _failed(reducer: str, count: int, reason: str) -> ReduceError:
    text = f"reducer {reducer} cannot reduce {count} results: {reason}"
    return ReduceError(text, reducer=reducer, results=count)


def _takes_weights(reducer: Reducer) -> bool:
    if isinstance(reducer, functools.partial) and "weights" in reducer.keywords:
        return False  # the partial has bound the weights
    try:
        parameter = inspect.signature(reducer).parameters.get("weights")
    except (TypeError, ValueError):  # functions written in C need not have a signature
        return False
    return parameter is not None and parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )
