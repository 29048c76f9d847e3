from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchweft import deaths
from torchweft.deaths import FACT, VARIABLE, cause_of, leave_note, own_facts
from torchweft.engine.protocol.registration import Registration
from torchweft.engine.worker.peers import Peer

LIMIT_S = 10.0


@pytest.fixture(autouse=True)
def _launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, str(tmp_path / str(os.getpid())))
    yield
    deaths.follow("")
    deaths._without_parent.clear()


@pytest.fixture
def facts(tmp_path: Path) -> dict[str, str]:
    return {FACT: f"{tmp_path.name}/77"}


def test_what_the_launcher_noted_is_the_cause(tmp_path: Path, facts: dict[str, str]) -> None:
    leave_note(str(tmp_path), 77, "was killed by SIGKILL (out of memory)")
    assert cause_of(facts, "end of file") == "it was killed by SIGKILL (out of memory)"
    peer = Peer(Registration("b", 1, (), "", facts), main_by_name=False, is_self=False)
    lost = peer.declare_lost("end of file")
    assert lost is not None
    assert lost.cause == "it was killed by SIGKILL (out of memory)"
    assert str(lost).endswith(": it was killed by SIGKILL (out of memory)")


@pytest.fixture
def ended() -> Iterator[int]:
    """A process that has ended, as its parent has not noticed yet."""
    process = subprocess.Popen(["true"], stdin=subprocess.DEVNULL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


def test_the_wait_for_a_process_that_runs_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "ENDED_WAIT_S", 100 * LIMIT_S)
    start_s = time.monotonic()
    assert cause_of({FACT: f"{tmp_path.name}/{os.getpid()}"}, "end of file") == "end of file"
    assert deaths.WAIT_S <= time.monotonic() - start_s < LIMIT_S


def test_the_note_of_a_process_that_has_ended_is_waited_for_longer(
    tmp_path: Path, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {FACT: f"{tmp_path.name}/{ended}"}
    monkeypatch.setattr(deaths, "WAIT_S", 0.0)
    start_s = time.monotonic()
    assert cause_of(facts, "end of file") == "end of file"
    assert deaths.ENDED_WAIT_S <= time.monotonic() - start_s < LIMIT_S
    monkeypatch.setattr(deaths, "ENDED_WAIT_S", LIMIT_S)
    start_s = time.monotonic()
    assert cause_of(facts, "end of file") == "end of file"  # The parent is gone.
    assert time.monotonic() - start_s < LIMIT_S
    deaths._without_parent.clear()
    late = threading.Timer(0.05, leave_note, (str(tmp_path), ended, "ended with exit code 1"))
    late.start()
    assert cause_of(facts, "end of file") == "it ended with exit code 1"
    late.join()


@pytest.mark.parametrize("fact", [None, 3, "", "/77", "elsewhere/77", "../77", "{}/../77", "{}/x"])
def test_notes_of_others_are_neither_read_nor_waited_for(
    tmp_path: Path, fact: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_note(str(tmp_path), 77, "was killed")
    leave_note(str(tmp_path.parent), 77, "was killed")
    monkeypatch.setattr(deaths, "WAIT_S", 100 * LIMIT_S)
    monkeypatch.setattr(deaths, "ENDED_WAIT_S", 100 * LIMIT_S)
    facts = {FACT: fact.format(tmp_path.name) if isinstance(fact, str) else fact}
    assert cause_of(facts, "end of file") == "end of file"


def test_who_was_not_launched_has_no_note(
    tmp_path: Path, facts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_facts() == {FACT: f"{tmp_path.name}/{os.getpid()}"}
    monkeypatch.setenv(VARIABLE, str(tmp_path / "1"))  # inherited by a child of a worker
    assert own_facts() == {}
    monkeypatch.delenv(VARIABLE)
    assert own_facts() == {}
    leave_note(str(tmp_path), 77, "was killed")
    assert cause_of(facts, "end of file") == "end of file"
    deaths.follow(str(tmp_path))
    assert cause_of(facts, "end of file") == "it was killed"
