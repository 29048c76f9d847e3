"""Reading a link as the only one, and sending as another thread than the main one does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from torchweft.runtime import interrupts
from torchweft.transport.link import Link


@contextlib.contextmanager
def reading(link: Link) -> Iterator[None]:
    """Is the reader of a link in the block; nobody else is."""
    me = object()
    assert link.readers.setdefault(0, me) is me
    try:
        yield
    finally:
        link.readers.pop(0)


@pytest.fixture
def not_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the thread of the test do what all threads do that are not interrupted."""
    monkeypatch.setattr(interrupts, "main_id", 0)
