"""Ctrl-C at the steps at which a save begins leaves the directory free for the next one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interrupting import interrupt_at
from tests.unit.mapreduce.lone_worker import joined
from torchweft.checkpoint import save, save_async
from torchweft.checkpoint.saving import _TURNS

STEPS = 40
"""Those up to the plan, and some more; it is made after the turn has been taken."""


def save_soon(*args: Any, **options: Any) -> object:
    return save_async(*args, **options).wait()


@pytest.mark.parametrize("way", [save, save_soon])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in finalizers
def test_an_interrupted_save_does_not_keep_its_turn(
    tmp_path: Path, way: Callable[..., object]
) -> None:
    def run() -> None:
        way(tmp_path, {"steps": 1}, step=1)

    with joined():
        run()
        (turn,) = _TURNS.get().values()
        for step in range(1, STEPS + 1):
            assert interrupt_at(step, run)
            assert turn.acquire(timeout=10)
            turn.release()
