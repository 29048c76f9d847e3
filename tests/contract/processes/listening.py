"""Keeps what a worker logs, for tests that ask for it by a call."""

from __future__ import annotations

import logging
from typing import ClassVar


class Listener(logging.Handler):
    """Keeps the log texts of the worker that it is made on."""

    texts: ClassVar[list[str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


_listener = Listener()


def listen(is_on: bool) -> None:
    log = logging.getLogger("torchweft")
    (log.addHandler if is_on else log.removeHandler)(_listener)


def heard(part: str) -> list[str]:
    """Returns the texts with a part in them."""
    return [text for text in _listener.texts if part in text]
