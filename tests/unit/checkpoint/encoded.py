"""Entries that are encoded as snapshots have them."""

from __future__ import annotations

from typing import Any

from torchweft.checkpoint import kinds
from torchweft.checkpoint.encoding import Encoder, Part


def encoded(content: dict[str, dict[str, Any]]) -> Part:
    """Returns the part of some entries."""
    encoder = Encoder()
    for path, item in content.items():
        encoder.add(item["kind"], {path: item["state"]})
    return encoder.finish()


def saved(kind: str, value: Any) -> Any:
    """Returns a copy of the state of a value."""
    part = encoded({"x": {"kind": kind, "state": kinds.state_of(kind, value)}})
    return part.content()["x"]["state"]
