"""Changes JSON texts so that they stay JSON: other types, missing and additional fields."""

from __future__ import annotations

import json
import random
from typing import Any

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 1 << 40, 1 << 64, 1.5, float("inf"), "", "text", "\ud800"),
    *([], {}, [[]], [1, "a"], {"a": {"b": []}}, [None] * 9, "x" * 200),
)


def change_json(chance: random.Random, text: bytes) -> bytes | None:
    """Returns ``text`` with one value changed, removed or added; None if it is not JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    try:
        return json.dumps(_change(chance, value), ensure_ascii=chance.random() < 0.9).encode(
            errors="surrogatepass"
        )
    except RecursionError:
        return None


def _change(chance: random.Random, value: Any) -> Any:
    """Returns a value with some value inside it replaced."""
    if not value or not isinstance(value, (dict, list)) or chance.random() < 0.15:
        return _other(chance, value)
    step = chance.random()
    if isinstance(value, dict):
        key = chance.choice(list(value))
        if step < 0.1:
            del value[key]
        elif step < 0.2:
            value[chance.choice(("other", key + "x", "", "\ud800"))] = chance.choice(_VALUES)
        else:
            value[key] = _change(chance, value[key])
        return value
    place = chance.randrange(len(value))
    if step < 0.1:
        del value[place]
    elif step < 0.2:
        value.insert(place, chance.choice((*_VALUES, value[place])))
    else:
        value[place] = _change(chance, value[place])
    return value


def _other(chance: random.Random, value: Any) -> Any:
    """Returns something in place of ``value``, mostly of another type."""
    if chance.random() < 0.7:
        return chance.choice(_VALUES)
    if isinstance(value, str):
        return value[: chance.randrange(len(value) + 1)] + chance.choice(("", "x", "\0", "é", ":"))
    if isinstance(value, (int, float)):
        return value + chance.choice((-1, 1, 1 << 31, 1 << 63))
    return [value]
