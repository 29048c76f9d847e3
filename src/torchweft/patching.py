"""Refuses to run on threads and sockets that another library has replaced.

``gevent`` and ``eventlet`` replace Python's threads, sockets and polling, for all modules of a
process: all then run in one thread. Weft's threads wait in the kernel, and PyTorch's do too: they
would stop all others. So a process whose parts were replaced cannot become a worker.
"""

from __future__ import annotations

import _thread
import select
import socket

from torchweft.errors import ConfigurationError

_LIBRARIES = {
    "gevent": "gevent.monkey.patch_all(thread=False, socket=False, select=False, queue=False)",
    "eventlet": "eventlet.monkey_patch(thread=False, socket=False, select=False)",
}
"""How each library leaves Weft's parts as they are."""


def check_unpatched() -> None:
    """Raises ConfigurationError if threads, sockets or polling of this process were replaced."""
    parts = {
        "threads": _thread.start_new_thread,
        "sockets": socket.socket,
        "polling": select.select,
    }
    for part, member in parts.items():
        library = str(member.__module__).partition(".")[0]
        if library in _LIBRARIES:
            raise ConfigurationError(
                f"{library} has replaced Python's {part} in this process, which Weft and PyTorch "
                f"need as they are: call {_LIBRARIES[library]}, or patch nothing in processes "
                "that are workers, and talk to them by another process"
            )
