"""Errors that are RuntimeErrors as well as their original type.

``torch.distributed.rpc`` raises a RuntimeError for most errors of remote functions, and some
programs catch that. Other programs catch the original type. So under ``torchweft.compat`` an error
is both.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torchweft.serialize.exceptions import GROUPS, ORIGINAL_TYPE, copy_as


def as_runtime_error(error: BaseException) -> BaseException:
    """Returns an error that is a RuntimeError as well as its original type.

    It has the name, the text and the attributes of the original. If there can be no such type, as
    for a group of exceptions, the original is returned.
    """
    if isinstance(error, (RuntimeError, *GROUPS)) or not isinstance(error, Exception):
        return error
    try:
        kind: Any = type(error)
        return copy_as(_both(kind), error)
    except Exception:
        return error


@functools.lru_cache(maxsize=1024)
def _both(kind: Any) -> Any:
    """Returns a type that derives from ``kind`` and from RuntimeError."""

    def reduce(error: Any, protocol: Any) -> Any:
        return as_runtime_error, (copy_as(kind, error),)

    def fill(names: dict[str, Any]) -> None:
        names.update(
            {
                "__module__": kind.__module__,
                "__qualname__": kind.__qualname__,
                "__doc__": kind.__doc__,
                "__reduce_ex__": reduce,
                ORIGINAL_TYPE: kind,
            }
        )

    return types.new_class(kind.__name__, (kind, RuntimeError), {}, fill)
