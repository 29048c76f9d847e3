"""Settings of the process that a worker changes while it is one.

Cores. A thread of GNU's OpenMP that waits at the end of a parallel region spins for up to some
milliseconds before it sleeps. With several busy processes on a host it spins on a core that the
thread it waits for needs, and an operation of a millisecond takes hundreds. The library spins
300 times less as soon as its process has more OpenMP threads than cores, whatever else runs on
the host. Processes of ``torch.distributed.rpc`` have more: they start many threads, several of
which compute. A worker of Weft has one that computes.

So a worker watches whether threads of the host wait for cores. While they do, it has a second
team of idle OpenMP threads, just large enough to exceed the number of cores. On a quiet host it
has none, because spinning makes small operations up to three times as fast there.

The interpreter lock. A thread that computes in Python keeps the lock for the switch interval, 5 ms
by default, once another thread wants it. A call that arrives meanwhile needs the lock two or three
times, and would take 10 ms and more. The interval is one setting for the whole process: it is
shortened when a worker joins and restored when it leaves, unless other code has set it since.

Interrupts. Ctrl-C raises ``KeyboardInterrupt`` in the code that the main thread runs. If that is a
finalizer, or a callback of a weak reference, the interpreter prints the exception and goes on: the
program does not end. Handles, streams and graphs have finalizers, so programs that use many meet
this. So such an interrupt is repeated.

The compiler. ``torch.compile`` looks into all functions that a compiled function calls. A call of
another worker has no graph, and the compiler stumbles over its implementation. So Weft's files are
put on the compiler's list of files to skip: a compiled function is interrupted for a call, as for
``print``. The compiler takes more than a second to import, so Weft does not import it, but waits
for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
from _thread import get_ident
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchweft import knobs
from torchweft.engine.threads import interrupts
from torchweft.engine.threads.timers import Timers
from torchweft.probe import running_threads

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_LOOK_S = 1.0
_BUSY_LOOKS = 2
_QUIET_LOOKS = 20
"""Consecutive looks after which a host counts as busy, or as quiet again."""

_DECIDED_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


class SpinLimit:
    """Watches the host for one worker, and holds the second team. One thread may call ``tick``.

    Args:
        name: Name of the thread that has the team.
        running: Counts the threads of the host that run or wait for a core, the caller included.
    """

    def __init__(self, name: str, running: Callable[[], int] = running_threads) -> None:
        self._name = name
        self._running = running
        self._cores = os.cpu_count() or 1
        self._is_decided = any(variable in os.environ for variable in _DECIDED_BY_USER)
        self._looks = 0
        self._team: _Team | None = None

    def tick(self, now_s: float) -> float:
        """Looks at the host, and starts or ends the team; a job of the timers."""
        if self._is_decided:
            return math.inf
        is_busy = self._running() - 1 > self._cores
        self._looks = self._looks + 1 if is_busy is (self._team is None) else 0
        if self._looks >= (_BUSY_LOOKS if self._team is None else _QUIET_LOOKS):
            self._looks = 0
            if self._team is None:
                self._begin()
            else:
                self._end()
        return now_s + _LOOK_S

    def _begin(self) -> None:
        if torch.get_num_threads() > 1:
            library = _loaded_library()
            self._is_decided = library is None
            if library is not None:
                self._team = _Team(self._name, library)

    def _end(self) -> None:
        team, self._team = self._team, None
        if team is not None:
            team.end()

    def close(self) -> None:
        """Ends the team for good. Call it once the timers have ended: they may begin one."""
        self._is_decided = True
        self._end()


class _Team:
    """OpenMP threads that sleep, and the thread to which they belong."""

    def __init__(self, name: str, library: ctypes.CDLL) -> None:
        self._is_over = threading.Event()
        self._library = library
        # Together with a team of the usual size, one thread more than the library has cores.
        self._size = max(library.omp_get_num_procs() - torch.get_num_threads(), 0) + 2
        self._thread = threading.Thread(target=self._hold, name=name, daemon=True)
        self._thread.start()

    def _hold(self) -> None:
        # A parallel region creates the threads; they live as long as the thread that began it.
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
        self._library.GOMP_parallel(nothing, None, ctypes.c_uint(self._size), ctypes.c_uint(0))
        self._is_over.wait()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()


def _loaded_library() -> ctypes.CDLL | None:
    """Returns the OpenMP library of this process, if it is GNU's; torch bundles its own copy."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        path = next(line.split(maxsplit=5)[5] for line in lines if "libgomp" in line)
        library = ctypes.CDLL(path)
        library.GOMP_parallel.restype = None
    except (OSError, StopIteration, AttributeError):
        return None
    return library


class ShortSwitches:
    """Shortens the switch interval until closed; a ``SWITCH_INTERVAL_S`` of 0 leaves it alone."""

    def __init__(self) -> None:
        self._before_s = sys.getswitchinterval()
        wanted_s = knobs.SWITCH_INTERVAL_S.get()
        if 0.0 < wanted_s < self._before_s:
            sys.setswitchinterval(wanted_s)
        self._set_s = sys.getswitchinterval()

    def close(self) -> None:
        """Restores the interval, unless other code has set it since."""
        if sys.getswitchinterval() == self._set_s:
            sys.setswitchinterval(self._before_s)


_AGAIN_S = 0.01
"""After how long an interrupt comes again. At once, the hook or the same finalizer would get it."""


class RepeatedInterrupts:
    """Repeats the interrupts that finalizers of the main thread swallow.

    Args:
        timers: The timers of the worker.
    """

    def __init__(self, timers: Timers) -> None:
        self._due_s = math.inf
        self._timer = timers.add(self._tick)
        self._hook = self._look_at  # One object, to be recognized.

    def begin(self) -> None:
        """Looks at all exceptions that are swallowed from now on."""
        self._former = sys.unraisablehook
        sys.unraisablehook = self._hook

    def end(self) -> None:
        """Stops that, unless the program has another hook by now."""
        if sys.unraisablehook is self._hook:
            sys.unraisablehook = self._former

    def _look_at(self, swallowed: UnraisableHookArgs) -> None:
        is_of_main = get_ident() == interrupts.main_id
        if is_of_main and issubclass(swallowed.exc_type, KeyboardInterrupt):
            self._due_s = time.monotonic() + _AGAIN_S
            self._timer.wake_by(self._due_s)
        else:
            self._former(swallowed)

    def _tick(self, now_s: float) -> float:
        if now_s >= self._due_s:
            self._due_s = math.inf
            if callable(signal.getsignal(signal.SIGINT)) and interrupts.main_id is not None:
                signal.pthread_kill(interrupts.main_id, signal.SIGINT)
        return self._due_s


_RULES = "torch._dynamo.trace_rules"
"""The module of the compiler that has the list."""


def hide_from_compiler() -> None:
    """Puts Weft on the compiler's list, at once or as soon as the list is there."""
    if _RULES in sys.modules:
        _add_to(import_module(_RULES))  # Waits if another thread is importing it.
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder:
    """Waits for the import of the list."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Returns the other finders' spec for the list, and extends the list after its import."""
        if fullname != _RULES:
            return None
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                del loader.exec_module  # The module keeps its loader.
                execute(module)
                _add_to(module)

            loader.exec_module = exec_module
        return spec


_finder: Any = _Finder()
_has_added = False


def _add_to(rules: Any) -> None:
    global _has_added
    if not _has_added:
        _has_added = True
        rules.add(__name__.partition(".")[0])
