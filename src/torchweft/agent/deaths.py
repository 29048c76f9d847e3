"""What the launcher knows of a worker's end: the signal that killed it, or its exit code.

The others notice that a connection has ended. Why, only the parent of the process learns, a moment
later. It writes a note into a folder of the launcher's, named after the process; who declares a
worker lost that was started by the same launcher looks for the note, and waits for it a few
milliseconds. Each worker says in its registration which note would be its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

VARIABLE = "WEFT_DEATH_NOTE"
"""Environment variable by which a launcher tells a worker the path of its note."""

FACT = "note"
WAIT_S = 0.01
_LOOK_S = 0.0005
_MOST_CHARACTERS = 200

_folder = ""


def follow(folder: str) -> None:
    """Has this process read the notes of ``folder``, where it is the launcher; "" for none."""
    global _folder
    _folder = folder


def own_facts() -> dict[str, str]:
    """Returns what a worker says of its note in its registration."""
    path = os.environ.get(VARIABLE, "")
    # A process that a worker has started finds the variable, too.
    if os.path.basename(path) != str(os.getpid()):
        return {}
    return {FACT: _name(os.path.dirname(path), os.getpid())}


def leave_note(folder: str, pid: int, text: str) -> None:
    """Writes how a worker process ended, as the end of a sentence; for its parent."""
    path = os.path.join(folder, str(pid))
    with contextlib.suppress(OSError):  # The folder is gone: so is everybody who would read it.
        with open(path + ".new", "w") as file:
            file.write(text)
        os.rename(path + ".new", path)


def cause_of(facts: Mapping[str, Any], noticed: str) -> str:
    """Returns why a worker is lost; what was noticed, where nobody knows better.

    Args:
        facts: Those of the worker's registration.
        noticed: What this worker has noticed.
    """
    folder = _folder or os.path.dirname(os.environ.get(VARIABLE, ""))
    pid = str(facts.get(FACT)).rpartition("/")[2]
    if not folder or not pid.isdigit() or facts.get(FACT) != _name(folder, int(pid)):
        return noticed
    path = os.path.join(folder, pid)
    end_s = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(OSError), open(path) as file:
            return f"it {file.read(_MOST_CHARACTERS)}"
        if time.monotonic() >= end_s:
            return noticed
        time.sleep(_LOOK_S)


def _name(folder: str, pid: int) -> str:
    return f"{os.path.basename(folder)}/{pid}"
