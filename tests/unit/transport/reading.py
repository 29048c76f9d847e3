"""Reading a link as its only reader, and sending as threads other than the main one do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from torchweft.runtime import interrupts
from torchweft.transport.link import Link


@contextlib.contextmanager
def reading(link: Link) -> Iterator[None]:
    """Makes the caller the only reader of a link while the block runs."""
    me = object()
    assert link.readers.setdefault(0, me) is me
    try:
        yield
    finally:
        link.readers.pop(0)


@pytest.fixture
def not_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the test's thread act as a thread that no signal handler interrupts."""
    monkeypatch.setattr(interrupts, "main_id", 0)
