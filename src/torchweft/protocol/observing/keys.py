"""Texts by which observers tell calls and references apart, the same from all workers."""

from __future__ import annotations

from torchweft.ids import ReferenceId


def call_key(caller: str, number: int) -> str:
    """Returns the key of a call whose caller waits for an answer."""
    return f"{caller}#{number}"


def reference_key(reference: ReferenceId) -> str:
    """Returns the name of a reference, the same at all workers."""
    return f"RRef({reference.creator}.{reference.number} of {reference.owner})"


def making_key(reference: str) -> str:
    """Returns the key of a call that makes a value."""
    return f"make {reference}"
