"""Processes whose threads and sockets another library has replaced."""

from __future__ import annotations

import _thread
import select
import socket
from typing import Any

import pytest

from torchweft.errors import ConfigurationError
from torchweft.patching import check_unpatched


def _replaced(library: str) -> Any:
    def member(*args: Any) -> None: ...

    member.__module__ = f"{library}._part"
    return member


@pytest.mark.parametrize(
    ("library", "home", "name", "part"),
    [
        ("gevent", _thread, "start_new_thread", "threads"),
        ("gevent", select, "select", "polling"),
        ("eventlet", socket, "socket", "sockets"),
    ],
)
def test_the_library_the_part_and_the_remedy_are_named(
    monkeypatch: pytest.MonkeyPatch, library: str, home: Any, name: str, part: str
) -> None:
    check_unpatched()
    monkeypatch.setattr(home, name, _replaced(library))
    with pytest.raises(
        ConfigurationError, match=rf"{library} has replaced Python's {part}.*=False"
    ):
        check_unpatched()
