from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from torchweft.checkpoint import background


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        background, "current", lambda: SimpleNamespace(info=SimpleNamespace(name="ps"))
    )


def test_it_runs_on_a_thread_with_a_name() -> None:
    def name() -> tuple[str, bool]:
        thread = threading.current_thread()
        return thread.name, thread.daemon

    assert background.start(name, "save", is_awaited=True).wait() == ("weft-ps-save", False)
    assert background.start(name, "part", is_awaited=False).wait() == ("weft-ps-part", True)


class Thing:
    pass


def test_an_error_keeps_nothing_that_its_frames_had() -> None:
    things: list[weakref.ref[Thing]] = []

    def fail() -> None:
        thing = Thing()
        things.append(weakref.ref(thing))
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    future: torch.futures.Future[None] = background.start(fail, "x", is_awaited=True)
    with pytest.raises(ValueError, match="outer"):
        future.wait()
    gc.collect()
    assert things[0]() is None
