"""Dataclasses as JSON, and back: strictly, since the sender may be another version."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from torchweft.columns import LAYOUT, printable
from torchweft.errors import ProtocolError

T = TypeVar("T")
_LARGEST = 1 << 64


def read(wanted: type[T], data: object) -> T:
    """Returns the object of a dataclass that ``dataclasses.asdict`` made ``data`` of.

    Args:
        wanted: The dataclass. Its fields are numbers, texts, tuples of one type (with ``...``) or
            of several, dictionaries with texts as keys, and further dataclasses. Unknown
            fields of ``data`` are ignored, and fields with a default may be missing. Characters
            of texts that control a terminal are escaped.
        data: The output of ``json.loads``.

    Raises:
        ProtocolError: A field is missing, has the wrong type, or is an impossible number.
    """
    made: T = _read(wanted, data, wanted.__name__)
    return made


def _read(wanted: Any, data: object, place: str) -> Any:
    if is_dataclass(wanted):
        return _read_object(wanted, data, place)
    origin = typing.get_origin(wanted)
    if origin is tuple:
        return _read_tuple(typing.get_args(wanted), _checked(data, list, place), place)
    if origin is dict:
        kind = typing.get_args(wanted)[1]
        pairs = _checked(data, dict, place).items()
        return {
            printable(str(key), LAYOUT): _read(kind, value, f"{place}.{key}")
            for key, value in pairs
        }
    if wanted is float and type(data) is int:
        data = float(_limited(data, place))
    value = _checked(data, wanted, place)
    if wanted is str:
        return printable(value, LAYOUT)
    return _limited(value, place) if wanted in (int, float) else value


def _limited(value: int | float, place: str) -> int | float:
    """Returns a number with which one can calculate, and that a clock can show."""
    if not -_LARGEST < value < _LARGEST:  # Nor is it a NaN.
        raise ProtocolError(f"{place} of a report is a number beyond any that a worker has")
    return value


def _read_tuple(kinds: tuple[Any, ...], found: list[object], place: str) -> tuple[Any, ...]:
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(found)
    if len(kinds) != len(found):
        raise ProtocolError(f"{place} of a report has {len(found)} parts, not {len(kinds)}")
    return tuple(_read(kind, each, place) for kind, each in zip(kinds, found, strict=True))


def _read_object(wanted: Any, data: object, place: str) -> Any:
    found: Mapping[str, object] = _checked(data, dict, place)
    hints = _hints(wanted)
    required = {each.name for each in fields(wanted) if each.default is MISSING}
    missing = required - found.keys()
    if missing:
        raise ProtocolError(f"{place} of a report lacks {', '.join(sorted(missing))}")
    return wanted(
        **{
            name: _read(kind, found[name], f"{place}.{name}")
            for name, kind in hints.items()
            if name in found
        }
    )


def _checked(data: object, wanted: type, place: str) -> Any:
    if type(data) is not wanted:
        raise ProtocolError(
            f"{place} of a report is a {type(data).__name__}, not a {wanted.__name__}; observe "
            "with the version of Weft that the workers have"
        )
    return data


@functools.cache
def _hints(wanted: Any) -> types.MappingProxyType[str, Any]:
    hints = typing.get_type_hints(wanted)
    return types.MappingProxyType({field.name: hints[field.name] for field in fields(wanted)})
