"""Reading a link as its only reader, and sending as threads other than the main one do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from torchweft.engine.io.link import Link
from torchweft.engine.threads import interrupts
from torchweft.engine.wire.frames import Frame


@contextlib.contextmanager
def reading(link: Link) -> Iterator[None]:
    """Makes the caller the only reader of a link while the block runs."""
    assert link.claim()
    try:
        yield
    finally:
        link.unclaim()


def received(link: Link, *, may_block: bool) -> list[Frame]:
    """Receives as the only reader of a link; returns the frames."""
    link.receive(may_block=may_block)
    return [link.incoming.popleft() for _ in range(len(link.incoming))]


@pytest.fixture
def not_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the test's thread act as a thread that no signal handler interrupts."""
    monkeypatch.setattr(interrupts, "main_id", 0)
