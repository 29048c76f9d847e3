"""The state that a program has saved: a tree of dicts and lists, with what is to be saved in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torchweft.checkpoint.plain import is_plain
from torchweft.errors import ArgumentTypeError, ConfigurationError

SEPARATOR = "/"


class Leaf(NamedTuple):
    """One entry of the state.

    Attributes:
        path: The keys that lead to it, joined by ``/``.
        value: What is there.
        container: The dict or list that it is in.
        key: Its key or its place there.
    """

    path: str
    value: Any
    container: Any
    key: Any


def leaves(state: object) -> list[Leaf]:
    """Returns the entries of a state.

    A dict or list in which there is nothing but plain values is one entry: a history that grows,
    say. The state itself never is.

    Raises:
        ArgumentTypeError: It is no dict, or has a key that is no string.
        ConfigurationError: A key is empty or has a ``/`` in it.
    """
    if not isinstance(state, dict):
        raise ArgumentTypeError(
            f"the state is a {type(state).__name__}; pass a dict like {{'model': model, "
            "'optimizer': optimizer}"
        )
    return list(_inside(state, ""))


def _inside(container: Any, prefix: str) -> Iterator[Leaf]:
    is_dict = isinstance(container, dict)
    for key, value in container.items() if is_dict else enumerate(container):
        path = prefix + (_checked(key, prefix) if is_dict else str(key))
        if isinstance(value, (dict, list)) and not is_plain(value):
            yield from _inside(value, path + SEPARATOR)
        else:
            yield Leaf(path, value, container, key)


def _checked(key: object, prefix: str) -> str:
    if not isinstance(key, str):
        raise ArgumentTypeError(
            f"the state has the key {key!r} in {prefix or 'it'!r}, a {type(key).__name__}; name "
            "its entries by strings"
        )
    if not key or SEPARATOR in key:
        raise ConfigurationError(
            f"the state has the key {key!r} in {prefix or 'it'!r}; a key must not be empty, and "
            f"have no {SEPARATOR!r}"
        )
    return key
