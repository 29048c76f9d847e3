"""Signal handlers and finalizers that raise or call, while the library is at work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.processes import signal_programs
from tests.processes.signal_programs import RAISED, WORK

LIMIT_S = 55


@pytest.fixture(params=["auto", "0"], ids=["native", "plain"])
def run(request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    """Runs a program with a twin; returns its lines."""

    def run_program(*arguments: str) -> list[str]:
        ended = subprocess.run(
            [sys.executable, "-m", signal_programs.__name__, *arguments],
            env={**os.environ, "WEFT_NATIVE": request.param, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()

    return run_program


def test_exceptions_of_handlers_arrive_as_they_are(run: Callable[..., list[str]]) -> None:
    """Except in finalizers and callbacks of weak references, where the interpreter drops them."""
    told = f"{RAISED} arrived or were dropped in a finalizer"
    expected = f"{RAISED} raised, {told}, wrong: []"
    assert run("raising", *WORK) == [*(f"{each} {expected}" for each in WORK), "left"]


def test_a_handler_may_call(run: Callable[..., list[str]]) -> None:
    assert run("calling", *WORK) == [*(f"{each} the handler has called" for each in WORK), "left"]


def test_a_finalizer_under_the_collector_may_call(run: Callable[..., list[str]]) -> None:
    works = ("call", "call_with_tensor", "backward")
    assert run("collecting", *works) == [*(f"{each} 0 threads wait" for each in works), "left"]
