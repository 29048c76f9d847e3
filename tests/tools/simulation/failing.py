"""Whether a simulation notices a fault."""

from __future__ import annotations

from collections.abc import Callable


def fails(program: Callable[..., object], *arguments: object) -> bool:
    try:
        program(*arguments)
    except AssertionError:
        return True
    return False
