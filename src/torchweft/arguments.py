"""Checks of arguments; their errors name the argument, its value, and what it should be."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Collection, Iterable
from numbers import Real
from typing import Any

from torchweft.errors import ArgumentTypeError, ConfigurationError

UNSET_RPC_TIMEOUT = -1.0
"""Stands for the worker's default time limit."""

_SHOWN_LENGTH = 60
_SECONDS = "pass a number of seconds, or 0 for no limit"


def kind_of(value: object) -> str:
    """Returns the type of a value with its article, for messages."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def wrong_type(name: str, value: object, fix: str) -> ArgumentTypeError:
    """Returns the error for an argument whose type cannot work."""
    text = repr(value) if isinstance(value, (str, bytes, int, float)) else ""
    shown = f"{text}, " if text and len(text) <= _SHOWN_LENGTH else ""
    return ArgumentTypeError(f"{name} is {shown}{kind_of(value)}; {fix}")


def checked_int(name: str, value: Any) -> int:
    """Returns an argument as an integer.

    Raises:
        ArgumentTypeError: It is not an integer.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise wrong_type(name, value, "pass an integer") from None


def is_number(value: object) -> bool:
    """Whether a value is a real number; a bool or a tensor is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_type(value: object, expected: type, name: str, example: str) -> None:
    """Checks the type of an argument.

    Args:
        value: The argument.
        expected: Its type.
        name: Name of the argument.
        example: What to pass, for the message.

    Raises:
        ArgumentTypeError: It is of another type.
    """
    if not isinstance(value, expected):
        raise wrong_type(name, value, f"pass {example}")


def check_workers(names: Any, name: str) -> None:
    """Checks an argument that lists workers.

    Raises:
        ArgumentTypeError: It is no list of names; a text alone is none either.
    """
    is_list = isinstance(names, Collection) and not isinstance(names, (str, bytes))
    if not is_list or not all(isinstance(each, str) for each in names):
        raise ArgumentTypeError(f"{name} is {names!r}; pass a list of names of workers")


def limit_of(timeout: Any, default_s: float) -> float:
    """Returns the time limit from an argument ``timeout``, in seconds; infinity for none.

    Args:
        timeout: Seconds; 0 for no limit, ``UNSET_RPC_TIMEOUT`` for the default.
        default_s: The default.

    Raises:
        ArgumentTypeError: It is not a number.
        ConfigurationError: It is negative or NaN.
    """
    try:
        if timeout == UNSET_RPC_TIMEOUT:
            return default_s
        if timeout > 0:
            return timeout  # type: ignore[no-any-return]
        if timeout == 0:
            return math.inf
    except TypeError:
        raise wrong_type("timeout", timeout, _SECONDS) from None
    raise ConfigurationError(f"timeout is {timeout!r}; {_SECONDS}")


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Returns a suggestion for a message about an unknown name: the closest name, if any is close.

    Args:
        name: The unknown name.
        names: The known ones; those that Python calls by itself are not suggested.
        prefix: Common prefix of the names, which the comparison ignores.
    """
    ends = [each.removeprefix(prefix) for each in names if not each.startswith("__")]
    close = difflib.get_close_matches(name.removeprefix(prefix), ends, 1)
    return f"; did you mean {prefix + close[0]!r}?" if close else ""


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raises ConfigurationError unless an argument is one of several texts."""
    if value not in choices:
        raise ConfigurationError(
            f"{name} is {value!r}; pass one of {', '.join(map(repr, choices))}"
        )


def check_callable(name: str, value: object, fix: str) -> None:
    """Raises ArgumentTypeError unless an argument can be called, or is None."""
    if value is not None and not callable(value):
        raise wrong_type(name, value, fix)
