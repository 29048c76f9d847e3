"""Finds what a test left behind: threads, processes, descriptors, shared memory and settings."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Collection, Mapping
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

GRACE_S = 1.0
"""How long resources that are closing when a test returns may take to disappear."""

POLL_S = 0.01

_SHARED_MEMORY = ("torch", "psm_")
"""How the names begin that PyTorch, Weft and Python's ``shared_memory`` give."""
KINDS = ("threads", "processes", "descriptors", "shared memory", "settings")

SETTINGS = (("torchweft.autograd.local_pass", "_sends_zeros"),)
"""Switches of the whole process, which ``torchweft.compat`` turns on: they change later passes."""

State = Mapping[str, Mapping[object, str]]
"""For each kind, the existing resources: their keys, with descriptions for messages."""


def take_state() -> State:
    """Returns what this process holds now."""
    held = _threads(), _processes(), _descriptors(), _shared_memory(), _settings()
    return dict(zip(KINDS, held, strict=True))


def find_leaks(before: State, kept: Collection[str] = ()) -> list[str]:
    """Returns resources that are not in ``before``; waits up to ``GRACE_S`` for them to go."""
    return settle(before, kept)[0]


def settle(before: State, kept: Collection[str] = ()) -> tuple[list[str], State]:
    """Returns the leaks as ``find_leaks`` does, and the state in the end."""
    now = take_state()
    leaks = _compare(before, now, kept)
    if leaks:
        gc.collect()
        deadline = time.monotonic() + GRACE_S
        while leaks and time.monotonic() < deadline:
            time.sleep(POLL_S)
            now = take_state()
            leaks = _compare(before, now, kept)
    return leaks, now


def _compare(before: State, now: State, kept: Collection[str]) -> list[str]:
    return [
        f"{kind}: {description}"
        for kind in KINDS
        if kind not in kept
        for key, description in now[kind].items()
        if key not in before[kind]
    ]


def _threads() -> dict[object, str]:
    """Returns the threads that Python code started; the autograd engine's appear as dummies."""
    return {
        thread: thread.name
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
    }


def _processes() -> dict[object, str]:
    """Returns the child processes of all threads, including zombies."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return {}  # without reading a file for each thread
    helpers = {_tracker("_pid"), _fork_server("_forkserver_pid")}
    return {
        pid: f"{pid} {_command_of(pid)}"
        for listing in Path("/proc/self/task").glob("*/children")
        for pid in map(int, _read(listing).split())
        if pid not in helpers
    }


def _descriptors() -> dict[object, str]:
    """Returns the open descriptors; a number reused for another file is another descriptor."""
    helpers = {_tracker("_fd"), _fork_server("_forkserver_alive_fd")}
    found: dict[object, str] = {}
    folder = os.open("/proc/self/fd", os.O_RDONLY)
    try:
        for name in os.listdir(folder):
            try:
                target = os.readlink(name, dir_fd=folder)
            except FileNotFoundError:
                continue  # another thread has closed it
            number = int(name)
            if number != folder and number not in helpers:
                found[number, target] = f"{number} -> {target}"
    finally:
        os.close(folder)
    return found


def _shared_memory() -> dict[object, str]:
    """Returns this user's entries of ``/dev/shm``, including those of other processes.

    Only those of PyTorch and of Python's ``shared_memory``: Weft names no memory, and other
    programs of the machine may keep any file there.
    """
    found: dict[object, str] = {}
    with os.scandir("/dev/shm") as entries:
        for entry in entries:
            if not entry.name.startswith(_SHARED_MEMORY):
                continue
            try:
                if entry.stat().st_uid == os.getuid():
                    found[entry.name] = entry.name
            except FileNotFoundError:
                continue
    return found


def _settings() -> dict[object, str]:
    """Returns the switches that are on."""
    return {
        (module, name): f"{module}.{name} is on"
        for module, name in SETTINGS
        if getattr(sys.modules.get(module), name, False)
    }


def _tracker(attribute: str) -> object:
    """Returns a field of multiprocessing's resource tracker: a permanent process and pipe."""
    return getattr(resource_tracker._resource_tracker, attribute, None)  # type: ignore[attr-defined]


def _fork_server(attribute: str) -> object:
    """Returns a field of multiprocessing's fork server: a permanent process and pipe."""
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
