"""One module for each decoder, with a ``TARGET`` of the module's name."""

from __future__ import annotations

import importlib

from tests.fuzz.target import Target

NAMES = (
    "frames",
    "ring",
    "messages",
    "references",
    "reference_counts",
    "inline",
    "values",
    "allowed_pickles",
    "tensor_table",
    "buffer_table",
    "session",
    "stripes",
    "greeting",
    "membership",
    "backward",
    "stream",
    "strict_member",
)


def load(name: str) -> Target:
    """Returns the target of a name; imports its decoder only now."""
    target: Target = importlib.import_module(f"tests.fuzz.targets.{name}").TARGET
    return target
