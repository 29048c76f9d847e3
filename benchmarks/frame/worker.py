"""One process of a side; started by ``group.py``, not by hand.

It reads orders from its standard input, one JSON object a line, and answers each with a line on
its original standard output. It ends at the end of its input, or when its parent ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from benchmarks.frame.place import Place


def main() -> None:
    """Pins this process to its cores before any thread exists, then runs its place."""
    end_with_parent()
    place = Place.from_json(sys.argv[1])
    os.sched_setaffinity(0, place.cores)
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from benchmarks.frame.runners import RUNNERS  # after pinning: works may start threads

    RUNNERS[place.runner](place, answers)


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent ends, even if this process is stopped."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() == 1:  # the parent has ended already
        sys.exit(1)


if __name__ == "__main__":
    main()
