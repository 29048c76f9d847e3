"""The threads of a worker, and how a message finds one without a hand-over.

The obvious shape, one thread that reads every socket and a queue to a pool, costs a thread
switch a message: 10-20 us, several times that across cores. Here every idle thread waits in the
same ``epoll_wait``, each connection armed for one event at a time. The kernel wakes exactly one
thread; it reads the connection, arms it again, and runs the call itself, while the other threads
go on waiting. Nothing is handed over unless several calls arrive at once.

A thread that has read tasks off a connection runs them before it arms the connection again: the
next message would wake a second thread, and the two would fight for the interpreter lock over
calls that take no time. A task that takes longer does not keep the connection from being read:
whoever blocks in a remote wait arms it, who is known to take long does so first, and the
timer thread arms what was left for ``REARM_S``.

Rules of this file:

* At most ``limit`` threads run tasks. One more waits for events, always, so that answers are
  read also when every runner is busy. A runner that blocks in a remote wait does not count.
* Tasks of one read run one after the other in the thread that read them. If the queue makes no
  progress within ``stall_s``, the timer thread wakes another thread (``help_if_stalled``). Waking
  helpers at once would have them fight for the interpreter lock over calls that take no time.
* A handler of an event never blocks and never runs user code; tasks do.
* What others may be waiting for (answers to calls, news of a lost worker, a new connection) is
  *urgent*: any thread that waits for events runs it, whatever the limit. A task may block where
  nobody sees it, as in PyTorch's ``wait_all``, until an urgent task completes what it waits for.
* A thread has no modes of PyTorch when a task begins: those that one leaves behind are ended.
* Where the system refuses a thread, as a container's limit does, what there is goes on, and the
  timer thread has it tried again until there is one.
* No exception ends a thread, whatever its type: tasks answer calls with what user code raises.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

from torchweft.runtime.exception_log import log_exception
from torchweft.runtime.fair_queue import FairQueue, Task
from torchweft.runtime.interrupts import call
from torchweft.runtime.thread_modes import READERS, UNTOUCHED, tidy

_log = logging.getLogger("torchweft")

_READ = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
_WRITE = select.EPOLLOUT | select.EPOLLONESHOT
# Without EPOLLONESHOT a closed connection would be reported over and over while paused.
_PAUSED = select.EPOLLONESHOT
_first = operator.itemgetter(0)
_CLOSED = -1  # Whoever still writes to it fails; another file may get the old number.
_SPARE_THREADS = 4
_LOOKS_UNTIL_STUCK = 10


class Reactor:
    """Waits for events on many descriptors with many threads, and runs tasks on them.

    Args:
        name: Prefix of the threads' names.
        limit: Number of tasks that run at a time.
        tasks: Those that wait to run.
    """

    def __init__(self, name: str, limit: int, tasks: FairQueue) -> None:
        self.tasks = tasks
        self.urgent: deque[Task] = deque()
        self._name = name
        self._limit = limit
        self._extra = 0
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._followers: dict[int, Callable[[bool], bool]] = {}
        self.unarmed: dict[int, int] = {}
        """Descriptors that were left unarmed, for their followers or the timer thread."""
        self._was_unarmed: dict[int, int] = {}
        self._unarmed_count = self._last_count = 0
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._started = 0
        self._waiting = 0
        self._running = 0
        self._running_urgent = 0
        self._idling = 0
        self._completed = 0
        self._completed_at_last_look = -1
        self._stalled_looks = 0
        self._is_watched = False
        self._lacks_thread = False
        self._looks_for_thread = 0
        self.on_queued: Callable[[], None] = lambda: None
        """Called when tasks begin to wait: see that ``help_if_stalled`` is called soon."""
        self.on_unarmed: Callable[[], None] = lambda: None
        """Called when a descriptor is left unarmed: see that ``arm_if_left`` is called soon."""
        self.held: dict[Any, Any] = {}
        """What is held back while tasks run that take no time."""
        self.on_pause: Callable[[], None] = lambda: None
        """Called when tasks have ended or are about to take long: nothing may be held now."""
        self._is_closing = False
        self._local = threading.local()
        # Edge-triggered and never read: each write wakes one waiting thread.
        self._wake_fd = os.eventfd(0)
        self._epoll.register(self._wake_fd, select.EPOLLIN | select.EPOLLET)
        # Level-triggered and written once: wakes all of them.
        self._close_fd = os.eventfd(0)
        self._epoll.register(self._close_fd, select.EPOLLIN)
        self._spawn()

    @property
    def is_closing(self) -> bool:
        """Whether ``close`` has begun."""
        return self._is_closing

    @property
    def activity(self) -> int:
        """A number that changes whenever a task ends."""
        return self._completed

    @property
    def busy(self) -> int:
        """Number of tasks that run or wait to run."""
        running = self._running + self._running_urgent - self._idling
        return running + len(self.tasks) + len(self.urgent)

    @property
    def limit(self) -> int:
        """How many tasks run at a time; those that wait for other workers do not count."""
        return self._limit

    @property
    def running(self) -> int:
        """Number of tasks that run now, without those that wait for other workers."""
        return self._running

    @contextlib.contextmanager
    def idling(self) -> Iterator[None]:
        """Has this urgent task not count as busy meanwhile: what it waits for may never come."""
        with self._lock:
            self._idling += 1
        try:
            yield
        finally:
            with self._lock:
                self._idling -= 1

    # Descriptors

    def watch_reading(
        self,
        fd: int,
        handler: Callable[[], None],
        follower: Callable[[bool], bool] | None = None,
    ) -> None:
        """Has ``handler`` called, on one thread, when ``fd`` is readable; then it is paused.

        Args:
            fd: The descriptor.
            handler: Called on one of the threads.
            follower: Called by the same thread when it has done what followed from the event,
                with whether it may look for more for a moment. It arms the descriptor again,
                or returns that there was more to do.
        """
        self._handlers[fd] = handler
        if follower is not None:
            self._followers[fd] = follower
        self._epoll.register(fd, _READ)

    def leave_unarmed(self, fd: int) -> None:
        """Leaves the arming of ``fd`` to the follower, which comes after the tasks."""
        self._unarmed_count += 1
        self.unarmed[fd] = self._unarmed_count
        self.on_unarmed()  # Always, and last: what else is unarmed may be taken at any moment.

    def take_unarmed(self, fd: int) -> bool:
        """Returns whether ``fd`` is still unarmed; who asks arms it."""
        return self.unarmed.pop(fd, None) is not None

    def arm_all(self) -> None:
        """Arms what was left unarmed: this thread is about to take longer."""
        if self.held:
            self.on_pause()
        self.arm_unarmed()

    def arm_unarmed(self) -> None:
        """Arms what was left unarmed; may be interrupted anywhere."""
        while self.unarmed:
            fds = map(_first, iter(self.unarmed.popitem, None))
            try:
                # One step of Python: what was taken is armed.
                deque(map(self._epoll.modify, fds, repeat(_READ)), maxlen=0)
            except KeyError:
                return  # That was all, or another thread was faster.
            except (OSError, ValueError):
                continue  # Forgotten or closed meanwhile.

    def arm_if_left(self) -> bool:
        """Arms what was unarmed at the last look already; returns whether to look again.

        That is so for as long as calls come: waking the timer thread for each would cost more.
        """
        if self.held:
            self.on_pause()
        for fd, count in self._was_unarmed.items():
            # Another number: it was taken and left again since.
            if self.unarmed.get(fd) == count and self.take_unarmed(fd):
                self.resume_reading(fd)
        last_count, self._last_count = self._last_count, self._unarmed_count
        self._was_unarmed = self.unarmed.copy()
        return bool(self._was_unarmed) or last_count != self._last_count

    def resume_reading(self, fd: int) -> None:
        """Arms ``fd`` for one more event."""
        try:
            self._epoll.modify(fd, _READ)
        except (OSError, ValueError):
            pass  # Forgotten or closed meanwhile. Suppressing costs more than the call itself.

    def pause_reading(self, fd: int) -> None:
        """Keeps ``fd`` from waking a thread: the caller reads it itself."""
        try:
            self._epoll.modify(fd, _PAUSED)
        except (OSError, ValueError):
            pass

    def watch_writing(self, fd: int, handler: Callable[[], None]) -> None:
        """Makes ``fd`` known; ``handler`` is called once after each ``resume_writing``."""
        self._handlers[fd] = handler
        self._epoll.register(fd, _PAUSED)

    def resume_writing(self, fd: int) -> None:
        """Arms ``fd`` for one event when it can be written."""
        with contextlib.suppress(OSError, ValueError):
            self._epoll.modify(fd, _WRITE)

    def forget(self, fd: int) -> None:
        """Stops watching ``fd``, before it is closed."""
        self._handlers.pop(fd, None)
        self._followers.pop(fd, None)
        self.unarmed.pop(fd, None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    # Tasks

    def submit(self, function: Callable[..., None], first: Any = None, second: Any = None) -> None:
        """Has ``function(first, second)`` run soon on one of the threads. Never blocks."""
        self.urgent.append((function, first, second))
        self.wake()

    def submit_task(self, function: Callable[..., None], first: Any = None) -> None:
        """Has ``function(first, None)`` run as a task that counts against the limit."""
        self.tasks.append((function, first, None))
        self.wake()

    def wake(self) -> None:
        """Wakes one waiting thread to look at the queue."""
        try:
            os.eventfd_write(self._wake_fd, 1)
        except (OSError, ValueError):
            pass  # closed

    def begin_wait(self) -> bool:
        """Stops counting this thread as running a task, before it blocks in a remote wait.

        Returns:
            Whether it was counted; then ``end_wait`` must follow.
        """
        if self.unarmed or self.held:
            self.arm_all()
        if not getattr(self._local, "is_running", False):
            if self.urgent:
                self.wake()  # This thread may be running urgent tasks, and blocks now.
            return False
        with self._lock:
            self._running -= 1
        if self.tasks.ready:
            self.wake()
        return True

    def end_wait(self) -> None:
        """Counts this thread again. For a moment there may be more than the limit."""
        with self._lock:
            self._running += 1

    def help_if_stalled(self, open_calls: int) -> bool:
        """Wakes one more thread if tasks wait and none ended since the last look.

        Args:
            open_calls: How many answers this worker waits for. As many tasks may be blocked
                where nobody sees it, as in PyTorch's ``wait_all``. If nothing moves for long,
                so many run beyond the limit: the answers may depend on tasks that wait here.

        Returns:
            Whether tasks are waiting, or a thread is lacking, so that looking again makes sense.
        """
        if self._lacks_thread:
            self._looks_for_thread += 1
            if self._looks_for_thread % _LOOKS_UNTIL_STUCK == 0:
                self._spawn_if_possible()
        if not self.tasks.ready and not self.urgent:
            self._completed_at_last_look = -1
            self._stalled_looks = self._extra = 0
            self._is_watched = self._lacks_thread
            return self._lacks_thread
        if self._completed == self._completed_at_last_look:
            self._stalled_looks += 1
            is_stuck = self._stalled_looks % _LOOKS_UNTIL_STUCK == 0
            if is_stuck and self._running >= self._limit + self._extra and self._extra < open_calls:
                self._extra += 1
            self.wake()
        else:
            self._stalled_looks = 0
        self._completed_at_last_look = self._completed
        return True

    def _watch_queue(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            self.on_queued()

    # Threads

    def _spawn(self) -> None:
        with self._lock:
            if self._is_closing:
                return  # Nobody would join it.
            name = f"{self._name}-{self._started + 1}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._waiting += 1
            try:
                thread.start()  # within the lock: who closes joins only what has started
            except BaseException:
                self._waiting -= 1
                raise
            self._started += 1
            self._threads.add(thread)

    def _spawn_if_possible(self) -> None:
        """Starts a thread that waits for events; the timer thread tries again if that fails."""
        try:
            self._spawn()
        except (RuntimeError, MemoryError) as error:
            if not self._lacks_thread:
                self._lacks_thread = True
                _log.warning("%s: no further call is served until there is one", error)
                self._watch_queue()
        else:
            self._lacks_thread = False

    def _serve(self) -> None:
        poll, handlers, followers = self._epoll.poll, self._handlers, self._followers
        is_needed = True
        while is_needed and not self._is_closing:
            for fd, _ in poll(-1, 1):
                handler = handlers.get(fd)
                if handler is not None:
                    try:
                        handler()
                    except BaseException:
                        log_exception("an event could not be handled")
                if self.tasks.ready or self.urgent:
                    is_needed = self._work()
                elif fd not in self.unarmed:
                    continue
                # Also where other threads were faster with the tasks.
                follower = followers.get(fd)
                while follower is not None and self._follow(fd, follower, is_needed):
                    is_needed = self._work()
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _follow(self, fd: int, follower: Callable[[bool], bool], may_look: bool) -> bool:
        try:
            return follower(may_look)
        except BaseException:
            log_exception("a connection could not be read")
            self.resume_reading(fd)
            return False

    def _work(self) -> bool:
        """Runs what waits to run; returns whether this thread is still needed."""
        while self.urgent or self.tasks.ready:
            is_urgent = bool(self.urgent)
            with self._lock:
                if is_urgent:
                    self._running_urgent += 1
                elif self._running < self._limit + self._extra:
                    self._running += 1
                else:
                    self._watch_queue()
                    return True
                self._waiting -= 1
                is_last_waiting = self._waiting == 0
            if is_last_waiting:
                self._spawn_if_possible()
            if is_urgent:
                self._run_all(self.urgent, self.urgent)
            else:
                self._run_tasks()
            with self._lock:
                if is_urgent:
                    self._running_urgent -= 1
                else:
                    self._running -= 1
                if self._waiting > _SPARE_THREADS and not self.tasks.ready:
                    return False
                self._waiting += 1
        return True

    def _run_tasks(self) -> None:
        self._local.is_running = True
        try:
            self._run_all(self.tasks, self.tasks.ready)
        finally:
            self._local.is_running = False
            if self.held:
                self.on_pause()

    def _run_all(self, queue: FairQueue | deque[Task], waiting: deque[Any]) -> None:
        while True:
            try:
                function, first, second = queue.popleft()
            except IndexError:
                return
            if waiting and not self._is_watched:
                self._watch_queue()
            try:
                function(first, second)
            except BaseException:
                log_exception("a message could not be handled")
            if tuple(map(call, READERS)) != UNTOUCHED:
                tidy()
            self._completed += 1
            # What is held here must not outlive the task: references count.
            del function, first, second
            if self._running > self._limit + self._extra:
                return  # Others came back from a wait; this one makes room.

    def close(self, timeout_s: float) -> list[str]:
        """Ends all threads; returns the names of those that did not end in time.

        Those run user code that does not return. They are daemons and end with the process.
        """
        self._is_closing = True
        os.eventfd_write(self._close_fd, 1)
        me = threading.current_thread()
        with self._lock:
            threads = [thread for thread in self._threads if thread is not me]
        share_s = timeout_s
        for thread in threads:
            thread.join(share_s)
            if thread.is_alive():
                share_s = 0.0
        stuck = [thread.name for thread in threads if thread.is_alive()]
        if not stuck:
            self._epoll.close()
            wake_fd, self._wake_fd = self._wake_fd, _CLOSED
            os.close(wake_fd)
            os.close(self._close_fd)
        return stuck
