"""Checks whether a certificate is issued to a name."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence


def check_name(names: Sequence[str], expected: str) -> None:
    """Raises ValueError unless ``expected`` is empty or one of ``names``.

    Only the same name matches: no wildcards, and an address in any notation.
    """
    if expected and _normal(expected) not in map(_normal, names):
        told = ", ".join(names) or "nobody"
        raise ValueError(f"it is made out to {told}, not to {expected!r}")


def _normal(name: str) -> object:
    try:
        return ipaddress.ip_address(name.strip())
    except ValueError:
        return name.lower().rstrip(".")
