"""Has the Python processes that this one starts install the replacement too."""

from __future__ import annotations


def enable() -> None:
    pass


def disable() -> None:
    pass
