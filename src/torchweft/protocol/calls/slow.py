"""The functions that are slow: while one runs, other calls need not wait."""

from __future__ import annotations

SLOW_S = 0.0005
"""A function whose last run took longer is slow."""
_LIMIT = 4096


class SlowFunctions(set[bytes]):
    """Names of functions whose last run was slow, at most 4,096. Hot path: ``in``."""

    def note(self, name: bytes, *, was_slow: bool) -> None:
        """Notes that a function has changed: it is slow no more, or has become slow.

        Args:
            name: Its name; empty if it travelled by value.
            was_slow: Whether it was slow before.
        """
        if was_slow:
            self.discard(name)
        elif name and len(self) < _LIMIT:
            self.add(name)
