"""The nursery: a process that imports once and forks workers, and is their parent.

Importing torch takes a second of processor time in every process; a forked worker inherits the
imported modules. A forked process inherits only the forking thread. So the nursery never starts
a thread and never computes: it imports, and then it waits.

The nursery's second task is that no worker outlives the launcher, however the launcher ends. The
kernel's signal at the parent's death (``PR_SET_PDEATHSIG``) is bound to the *thread* that forked,
and a launcher may fork from any thread. The nursery has one thread, so the signal is exact for
its own children. The nursery itself watches the launcher through a pidfd, which is bound to the
process, and through the control connection, which the launcher's death closes. So:

=================  =========================================================================
process that dies  what ends the workers
=================  =========================================================================
the launcher       the nursery sees it, signals every worker's process group, and leaves
the nursery        the kernel kills each worker; the launcher sees the end of the connection
both at once       the kernel kills each worker
=================  =========================================================================

Each worker leads its own process group, so the processes that it starts are signalled with it.
When a worker ends, the rest of its group is asked to end and then killed. The nursery reaps the
workers itself, so no signal ever goes to a reused process id.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchweft import notice, standard_streams
from torchweft.deaths import VARIABLE as NOTE_VARIABLE
from torchweft.deaths import leave_note
from torchweft.launch.control import ControlSocket, Ladder, Message
from torchweft.launch.job import Job, run_job
from torchweft.launch.report import MemoryKills, describe_exit

LEFTOVER_LADDER: Ladder = [(signal.SIGTERM, 0.5), (signal.SIGKILL, 0.5)]
GROUP_POLL_S = 0.05
LEAVE_LIMIT_S = 5.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class _Group:
    """One worker and the processes that it started; kept until all of them are gone."""

    key: str
    pid: int
    notes: str
    has_ended: bool = False
    ladder: list[tuple[int, float]] = field(default_factory=list)
    next_signal_s: float = 0.0
    was_told: bool = False

    def climb(self, now_s: float) -> None:
        """Sends the next signal of the ladder when it is due."""
        if self.ladder and now_s >= self.next_signal_s:
            number, wait_s = self.ladder.pop(0)
            self.was_told = True
            self.next_signal_s = now_s + wait_s
            self.send(number)

    def send(self, number: int) -> bool:
        """Signals the group; returns whether any process of the group exists."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # a process exists, but has changed user
        return True

    def is_gone(self, now_s: float) -> bool:
        if not self.has_ended:
            return False
        is_beyond_reach = not self.ladder and now_s >= self.next_signal_s
        return is_beyond_reach or not self.send(0)


class _Forked(Exception):
    """Unwinds a forked worker's stack to its bottom, where its job is run."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job


class _Nursery:
    """The nursery's loop."""

    def __init__(self, control: ControlSocket, launcher_pid: int) -> None:
        self._control = control
        self._groups: list[_Group] = []
        self._memory_kills = MemoryKills()
        self._directories: list[str] = []
        self._leave_by_s: float | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._resources = contextlib.ExitStack()
        for resource in (control, self._selector, self._wake_read, self._wake_write):
            self._resources.callback(resource.close)
        self._requests: dict[str, Callable[[Message], None]] = {
            "start": self._start,
            "stop": self._stop,
            "signal": self._signal,
            "remove at end": lambda request: self._directories.append(request["directory"]),
        }
        self._libc = ctypes.CDLL(None)
        self._watch(control.fileno(), self._read_requests)
        self._watch(self._wake_read.fileno(), self._clear_wake)
        self._watch_launcher(launcher_pid)
        self._watch_children()

    def run(self) -> None:
        """Serves until the launcher closes the connection or dies, then ends the workers.

        Returns when every worker is gone, or ``LEAVE_LIMIT_S`` later.
        """
        while self._leave_by_s is None or (self._groups and time.monotonic() < self._leave_by_s):
            for event, _ in self._selector.select(self._wait_s()):
                event.data()
            self._reap()
            now_s = time.monotonic()
            for group in self._groups:
                group.climb(now_s)
            self._groups = [group for group in self._groups if not group.is_gone(now_s)]
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)

    def _watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def _watch_launcher(self, launcher_pid: int) -> None:
        if hasattr(os, "pidfd_open"):
            try:
                launcher = os.pidfd_open(launcher_pid)
            except OSError:  # launcher gone, or no pidfds in this kernel: the connection ends too
                launcher = -1
            if launcher >= 0:
                self._resources.callback(os.close, launcher)
                self._watch(launcher, self._leave)
        if os.getppid() != launcher_pid:
            self._leave()

    def _watch_children(self) -> None:
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        if sys.platform == "linux":
            # Processes that a worker leaves behind become children of the nursery, which can then
            # tell when they are gone. In many containers, process 1 reaps no children.
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        # The program that started this process may have blocked it.
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if notice.VARIABLE in os.environ:
            # SLURM signals all processes of a step.
            signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)

    def _wait_s(self) -> float | None:
        """Returns the seconds until the next action is due; None to wait for an event."""
        waits = [GROUP_POLL_S for group in self._groups if group.has_ended]
        now_s = time.monotonic()
        waits += [max(0.0, group.next_signal_s - now_s) for group in self._groups if group.ladder]
        if self._leave_by_s is not None:
            waits.append(max(0.0, self._leave_by_s - now_s))
        return min(waits, default=None)

    def _read_requests(self) -> None:
        try:
            requests = self._control.receive()
        except EOFError:
            self._leave()
            return
        for request in requests if self._leave_by_s is None else []:
            self._requests[request["request"]](request)

    def _start(self, request: Message) -> None:
        stdout, stderr = self._control.take_descriptors(2)
        nursery_pid = os.getpid()
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns if there are threads. A linear algebra library may have started
                # some at import; such libraries park their threads for a fork themselves.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            os.close(stdout)
            os.close(stderr)
            self._tell({"event": "failed", "key": request["key"], "reason": str(error)})
            return
        if pid == 0:
            self._become_worker(request, stdout, stderr, nursery_pid)
        with contextlib.suppress(OSError):
            # The worker does this too: whichever process is first, signals to the group find it.
            os.setpgid(pid, pid)
        os.close(stdout)
        os.close(stderr)
        self._groups.append(_Group(request["key"], pid, request["notes"]))
        self._tell({"event": "started", "key": request["key"], "pid": pid})

    def _stop(self, request: Message) -> None:
        for group in self._groups:
            if request["key"] in (None, group.key):
                group.ladder = [(number, wait_s) for number, wait_s in request["ladder"]]
                group.next_signal_s = 0.0

    def _signal(self, request: Message) -> None:
        for group in self._groups:
            if group.key in request["keys"] and not group.has_ended:
                with contextlib.suppress(PermissionError):  # It has changed user.
                    os.kill(
                        group.pid, request["number"]
                    )  # It is not reaped: the number is its own.

    def _leave(self) -> None:
        if self._leave_by_s is None:
            self._leave_by_s = time.monotonic() + LEAVE_LIMIT_S
            for descriptor in set(self._selector.get_map()) - {self._wake_read.fileno()}:
                self._selector.unregister(descriptor)
            self._stop({"key": None, "ladder": LEFTOVER_LADDER})

    def _reap(self) -> None:
        """Reaps every ended child, including processes that workers left behind."""
        groups = {group.pid: group for group in self._groups}
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in groups:
                    self._worker_ended(groups[pid], os.waitstatus_to_exitcode(status))

    def _worker_ended(self, group: _Group, exit_code: int) -> None:
        is_killed = exit_code == -signal.SIGKILL
        is_memory_kill = self._memory_kills.take_one() if is_killed else None
        # First: the workers that were connected to it are looking for the note right now.
        leave_note(group.notes, group.pid, _ending_of(group, exit_code, is_memory_kill))
        group.has_ended = True
        group.ladder = list(LEFTOVER_LADDER)
        group.next_signal_s = 0.0
        ended: Message = {"event": "ended", "key": group.key, "exit_code": exit_code}
        self._tell({**ended, "is_memory_kill": is_memory_kill})

    def _tell(self, event: Message) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone, which the loop will see
            self._control.send(event)

    def _become_worker(self, request: Message, stdout: int, stderr: int, nursery_pid: int) -> None:
        """Detaches a forked process from the nursery and prepares it for its job."""
        if sys.platform == "linux":
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != nursery_pid:  # the nursery died before the line above took effect
            os._exit(1)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        self._resources.close()
        os.environ.clear()
        os.environ.update(request["environment"])
        note = os.environ[NOTE_VARIABLE] = os.path.join(request["notes"], str(os.getpid()))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(note)  # of an earlier process with this pid
        os.chdir(request["directory"])
        raise _Forked(request["job"])


def _ending_of(group: _Group, exit_code: int, is_memory_kill: bool | None) -> str:
    """Describes how a worker ended, for the other workers."""
    if group.ladder or group.was_told:
        return "was ended by the launcher"
    if exit_code == 0:
        return "ended with exit code 0 and had not called shutdown()"
    return describe_exit(exit_code, is_memory_kill)


def main(own_path: Sequence[str]) -> None:
    """Runs a nursery, and the job of every worker that it forks.

    Args:
        own_path: ``sys.path`` as the interpreter made it, before it was set to the launcher's.
    """
    standard_streams.open_missing()
    connection, launcher_pid, preload = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split()
    control = ControlSocket(socket.socket(fileno=connection))
    try:
        _preload(preload)
        _Nursery(control, launcher_pid).run()
    except _Forked as forked:
        job = forked.job
    except ConnectionError:
        os._exit(1)  # the launcher is gone already
    else:
        os._exit(0)  # nothing needs cleanup here, and torch's own takes a while
    run_job(job, own_path)


def _preload(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    # These objects live as long as the process. If the collector visited them, it would write to
    # all their pages, and the workers would no longer share those pages.
    gc.collect()
    gc.freeze()
