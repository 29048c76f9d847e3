"""Arrays of numpy in pickles that an allow-list admits: of numbers, and of objects one by one.

numpy trusts a pickle with its memory. An array of objects that is made of bytes takes them for
addresses. The state of a dtype can say that it has no objects, although it has. Setting the state
of an array that already has memory frees that memory under its views. So the functions that numpy
calls when a pickle is read go through this file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchweft.errors import SerializationError

_FLAGS = 7
_ITEM_BYTES = 5
_SUBARRAY, _NAMES, _FIELDS = 2, 3, 4
_DTYPE_PARTS = range(8, 10)
_KEPT_SIZE = (-1, 0)


def _reconstruct(kind: Any, shape: Any, code: Any) -> np.ndarray[Any, Any]:
    """Makes the empty array whose state comes next."""
    if kind is not _ARRAY:
        raise SerializationError("a message has an array of a class that is not numpy's")
    return np.empty(0, dtype=np.int8)


def _dtype(name: Any, *rest: Any) -> np.dtype[Any]:
    """Makes a dtype that is not shared, because its state comes next."""
    if not isinstance(name, str):
        raise SerializationError(f"a message has a dtype named by a {type(name).__name__}")
    return np.dtype(name, align=False, copy=True)


def _scalar(kind: Any, content: Any = b"") -> Any:
    _check_bytes(kind, content)
    return np.frombuffer(content, kind, 1)[0]


def _frombuffer(content: Any, kind: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    _check_bytes(kind, content)
    made = np.frombuffer(content, kind)
    if order == "K":
        return made.reshape(shape).transpose(axes)
    return made.reshape(shape, order=order)


def _check_bytes(kind: Any, content: Any) -> None:
    is_sound = isinstance(kind, np.dtype) and isinstance(content, (bytes, bytearray))
    if not is_sound or kind.hasobject or not kind.itemsize:
        raise SerializationError("a message makes values of numpy out of something else")


def check_state(target: object, state: Any) -> None:
    """Raises SerializationError if a pickle sets a state that numpy cannot have made.

    Args:
        target: An array or a dtype; any other object is not checked.
        state: The state that the pickle sets.
    """
    if isinstance(target, np.dtype):
        parts = state if isinstance(state, tuple) else ()
        if len(parts) not in _DTYPE_PARTS or not _is_own_state(target, parts):
            raise SerializationError(
                f"a message has a dtype like {target} with fields, or with a state that is not "
                "its own; send a dict of arrays instead"
            )
    elif isinstance(target, (np.ndarray, np.generic)):
        parts = state if isinstance(state, tuple) else ()
        content = parts[4] if len(parts) == 5 else None
        kind = parts[2] if len(parts) == 5 else None
        is_of_objects = isinstance(kind, np.dtype) and kind.hasobject
        expected = list if is_of_objects else (bytes, bytearray)
        if target.size or not isinstance(kind, np.dtype) or not isinstance(content, expected):
            raise SerializationError("a message sets an array of numpy to what it cannot be")


def _is_own_state(target: np.dtype[Any], parts: tuple[Any, ...]) -> bool:
    if any(parts[place] is not None for place in (_SUBARRAY, _NAMES, _FIELDS)):
        return False
    return parts[_FLAGS] == target.flags and parts[_ITEM_BYTES] in (*_KEPT_SIZE, target.itemsize)


class _Array:
    """Stands for the class of arrays, which may not be called."""


_ARRAY = _Array()

STAND_INS: dict[str, Any] = {
    "numpy:ndarray": _ARRAY,
    "numpy:dtype": _dtype,
    **{
        f"{package}.{name}": function
        for package in ("numpy.core", "numpy._core")
        for name, function in {
            "multiarray:_reconstruct": _reconstruct,
            "multiarray:scalar": _scalar,
            "numeric:_frombuffer": _frombuffer,
        }.items()
    },
}
"""Replacements of numpy's own functions in a pickle, by their names."""
