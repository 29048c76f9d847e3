"""Processes whose threads and sockets another library has replaced."""

from __future__ import annotations

import _thread
import select
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchweft
import torchweft.compat.rpc as compat_rpc
from torchweft import rpc
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


def test_no_worker_begins_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(select, "select", _replaced("gevent"))
    store = f"file://{tmp_path / 'store'}"
    options = rpc.RpcBackendOptions(init_method=store)
    starts: list[Callable[[], object]] = [
        lambda: rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options),
        lambda: compat_rpc.init_rpc("a", rank=0, world_size=1),
        torchweft.cluster(workers=1).start,
    ]
    for start in starts:
        with pytest.raises(ConfigurationError, match="gevent has replaced"):
            start()
