"""Tells what a test left behind: threads, processes, descriptors and shared memory."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Collection, Mapping
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

GRACE_S = 1.0
"""Time for what is closing when a test returns to be gone."""

POLL_S = 0.01

KINDS = ("threads", "processes", "descriptors", "shared memory")

State = Mapping[str, Mapping[object, str]]
"""For each kind, what there is: what it is known by, and how to call it in a message."""


def take_state() -> State:
    """Returns what this process holds now."""
    return dict(
        zip(KINDS, (_threads(), _processes(), _descriptors(), _shared_memory()), strict=True)
    )


def find_leaks(before: State, kept: Collection[str] = ()) -> list[str]:
    """Returns what there is more than ``before``, after waiting up to ``GRACE_S`` for it to go."""
    leaks = _compare(before, kept)
    if leaks:
        gc.collect()
        deadline = time.monotonic() + GRACE_S
        while leaks and time.monotonic() < deadline:
            time.sleep(POLL_S)
            leaks = _compare(before, kept)
    return leaks


def _compare(before: State, kept: Collection[str]) -> list[str]:
    now = take_state()
    return [
        f"{kind}: {description}"
        for kind in KINDS
        if kind not in kept
        for key, description in now[kind].items()
        if key not in before[kind]
    ]


def _threads() -> dict[object, str]:
    """Returns the threads that Python code started; the autograd engine's show up as dummies."""
    return {
        thread: thread.name
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
    }


def _processes() -> dict[object, str]:
    """Returns the children of all threads; a child that was not waited for counts."""
    helpers = {_tracker("_pid"), _fork_server("_forkserver_pid")}
    return {
        pid: f"{pid} {_command_of(pid)}"
        for listing in Path("/proc/self/task").glob("*/children")
        for pid in map(int, _read(listing).split())
        if pid not in helpers
    }


def _descriptors() -> dict[object, str]:
    """Returns the open descriptors; a number used again for another file is another one."""
    helpers = {_tracker("_fd"), _fork_server("_forkserver_alive_fd")}
    found: dict[object, str] = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the one that listed the folder
        if number not in helpers:
            found[number, target] = f"{number} -> {target}"
    return found


def _shared_memory() -> dict[object, str]:
    """Returns this user's entries of ``/dev/shm``, which other processes may have made as well.

    Not multiprocessing's semaphores: Weft has none, and programs of other tests may run meanwhile.
    """
    found: dict[object, str] = {}
    for entry in Path("/dev/shm").iterdir():
        if entry.name.startswith("sem.mp-"):
            continue
        try:
            if entry.stat().st_uid == os.getuid():
                found[entry.name] = entry.name
        except FileNotFoundError:
            continue
    return found


def _tracker(attribute: str) -> object:
    """Returns a field of multiprocessing's resource tracker: one process and one pipe, for good."""
    return getattr(resource_tracker._resource_tracker, attribute, None)  # type: ignore[attr-defined]


def _fork_server(attribute: str) -> object:
    """Returns a field of multiprocessing's fork server: one process and one pipe, for good."""
    return getattr(forkserver._forkserver, attribute, None)  # type: ignore[attr-defined]


def _command_of(pid: int) -> str:
    return (
        _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip() or "(ended, not waited for)"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
