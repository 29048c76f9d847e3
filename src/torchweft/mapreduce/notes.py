"""Adds notes to errors of a program: where in a map they were raised."""

from __future__ import annotations

import contextlib
from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)


def with_note(error: Error, text: str) -> Error:
    """Returns an error with a note, as ``add_note`` of Python 3.11 makes it."""
    # Some errors take no attributes: frozen dataclasses, for instance.
    with contextlib.suppress(Exception):
        error.__notes__ = [*getattr(error, "__notes__", ()), text]  # type: ignore[attr-defined]
    return error
