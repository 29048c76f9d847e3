"""Notice that this worker's host will be given up soon, as when SLURM pre-empts a job.

SLURM sends ``SIGTERM`` to every process of a job step, also to the workers. The same signal ends
workers when a run is over. So the launcher makes a file before it ends workers. Without that file,
the signal is a notice: the worker makes another file and goes on, and
``torchweft.checkpoint.resumable`` saves. Both files are empty, and in a folder of the launcher on
that host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

VARIABLE = "WEFT_NOTICE_FILE"
"""Environment variable with the path of the file that exists once there is notice."""

ENDING = "ending"
"""Name of the file beside it that exists once the launcher itself ends workers."""


def is_notice_given() -> bool:
    """Whether this worker's host will be given up soon."""
    path = os.environ.get(VARIABLE)
    return bool(path) and os.path.exists(path)  # type: ignore[arg-type]


def heed_notice() -> None:
    """Has ``SIGTERM`` give notice, if this worker's launcher can; a program's own handler stays."""
    path = os.environ.get(VARIABLE)
    is_main = threading.current_thread() is threading.main_thread()
    if not path or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    ending, own_pid = os.path.join(os.path.dirname(path), ENDING), os.getpid()

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() == own_pid and not os.path.exists(ending):
            # A link or a pipe of another user is neither followed nor waited for.
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with contextlib.suppress(OSError):
                os.close(os.open(path, flags, 0o666))
                return
        signal.signal(number, signal.SIG_DFL)  # as in processes that this one has forked
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, note)
