"""Tests that the leak check, which runs around every test, can fail."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from multiprocessing import shared_memory

import pytest

from tests import leaks
from torchweft.autograd import local_pass


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_S", 0.0)


def test_descriptor_is_found_even_where_its_number_was_open_before() -> None:
    first, second = os.pipe()
    before = leaks.take_state()
    os.close(first)
    reopened = os.open(os.devnull, os.O_RDONLY)
    try:
        assert reopened == first
        assert leaks.find_leaks(before) == [f"descriptors: {first} -> /dev/null"]
    finally:
        os.close(reopened)
        os.close(second)


def test_process_is_found_until_it_is_waited_for() -> None:
    before = leaks.take_state()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    found = leaks.find_leaks(before, kept={"descriptors"})
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    ended = leaks.find_leaks(before)
    child.wait()
    assert len(found) == 1
    assert found[0].startswith(f"processes: {child.pid} ")
    assert ended == [f"processes: {child.pid} (ended, not waited for)"]
    assert leaks.find_leaks(before) == []


def test_shared_memory_is_found() -> None:
    before = leaks.take_state()
    memory = shared_memory.SharedMemory(create=True, size=16)
    try:
        found = leaks.find_leaks(before, kept={"descriptors"})
        assert f"shared memory: {memory.name.removeprefix('/')}" in found
    finally:
        memory.close()
        memory.unlink()


def test_a_switch_that_stays_on_is_found() -> None:
    before = leaks.take_state()
    local_pass.enable_zeros()
    try:
        assert leaks.find_leaks(before) == [
            "settings: torchweft.autograd.local_pass._sends_zeros is on"
        ]
        assert leaks.find_leaks(leaks.take_state()) == []
    finally:
        local_pass.enable_zeros(False)
    for module, name in leaks.SETTINGS:
        assert getattr(importlib.import_module(module), name) is False
