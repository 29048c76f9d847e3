"""Notes about how a worker ended: the signal that killed it, or its exit code.

A note is a text file, named after the process. It ends a sentence that begins with the worker:
"was killed by SIGKILL". Readers take its first 200 characters.

Other workers notice only that a connection has ended. The parent process alone learns the cause, a
moment later. The parent writes the note into a folder of the launcher. A worker that declares a
worker of the same launcher lost looks for the note. If the process still runs, it waits for a few
milliseconds. If the process has ended, it waits longer: the note will come, but the parent may have
to wait for a core. Each worker names its own note in its registration.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

from torchweft.files import replacing

VARIABLE = "WEFT_DEATH_NOTE"
"""Environment variable by which a launcher tells a worker the path of its note."""

FACT = "note"
WAIT_S = 0.01
ENDED_WAIT_S = 0.3
"""How long to wait for the note of a process that has ended, in seconds."""
_LOOK_S = 0.0005
_MOST_CHARACTERS = 200

_folder = ""
_without_parent: set[str] = set()
"""Folders in which a note did not come: the parent has ended too, so no further one is certain."""


def follow(folder: str) -> None:
    """Sets the folder from which this process, if it is the launcher, reads notes; "" for none."""
    global _folder
    _folder = folder


def own_facts() -> dict[str, str]:
    """Returns the facts of a worker's registration that name its note."""
    path = os.environ.get(VARIABLE, "")
    # A process that a worker has started inherits the variable.
    if os.path.basename(path) != str(os.getpid()):
        return {}
    return {FACT: _name(os.path.dirname(path), os.getpid())}


def are_told_by_launcher() -> bool:
    """Whether this process is a launcher or has one, whose output tells of workers that end."""
    return bool(_folder or own_facts())


def leave_note(folder: str, pid: int, text: str) -> None:
    """Writes how a worker process ended, as the end of a sentence; called by its parent."""
    path = os.path.join(folder, str(pid))
    # An error: the folder is gone, and so are all readers.
    with contextlib.suppress(OSError), replacing(path, "w") as file:
        file.write(text)


def cause_of(facts: Mapping[str, Any], noticed: str) -> str:
    """Returns why a worker is lost: the text of its note, or else ``noticed``.

    Args:
        facts: The facts of the worker's registration.
        noticed: What this worker has noticed.
    """
    folder = _folder or os.path.dirname(os.environ.get(VARIABLE, ""))
    pid = str(facts.get(FACT)).rpartition("/")[2]
    if not folder or not pid.isdigit() or facts.get(FACT) != _name(folder, int(pid)):
        return noticed
    path = os.path.join(folder, pid)
    began_s = time.monotonic()
    while True:
        with contextlib.suppress(OSError), open(path) as file:
            return f"it {file.read(_MOST_CHARACTERS)}"
        waited_s = time.monotonic() - began_s
        if waited_s >= ENDED_WAIT_S:
            _without_parent.add(folder)
        if waited_s >= WAIT_S and (folder in _without_parent or not _has_ended(pid)):
            return noticed
        time.sleep(_LOOK_S)


def _has_ended(pid: str) -> bool:
    """Whether a process of this host has ended, also if its parent has not noticed yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except (OSError, IndexError):
        return True


def _name(folder: str, pid: int) -> str:
    return f"{os.path.basename(folder)}/{pid}"
