"""The threads of a worker, which read messages and run them without a hand-over.

The obvious design, one thread that reads every socket and a queue to a pool, costs a thread
switch per message: 10-20 us, several times that across cores. Here every idle thread waits in the
same ``epoll_wait``, each connection armed for one event at a time. The kernel wakes exactly one
thread; it reads the connection and runs the call itself, while the other threads continue to
wait. Nothing is handed over unless several calls arrive at once.

A thread that has read tasks from a connection in the native twin runs them before it arms the
connection again: otherwise the next message would wake a second thread, and the two would compete
for the interpreter lock over calls that take no time. A longer task does not keep the connection
from being read. A task that blocks in a remote wait arms it then; a task known to take long arms it
first; the timer thread arms connections left unarmed for ``REARM_S``.

Rules of this file:

* At most ``limit`` threads run tasks. One more always waits for events, so that answers are
  read even when every runner is busy. A runner that blocks in a remote wait does not count.
* Tasks of one read run one after the other in the thread that read them. If the queue makes no
  progress within ``stall_s``, the timer thread wakes another thread (``help_if_stalled``). Helpers
  woken at once would compete for the interpreter lock over calls that take no time.
* An event handler never blocks and never runs user code; tasks do. But one that counts as running
  tasks (``begin_tasks``) may run a call that came alone while no task waits.
* Tasks that others may be waiting for (answers to calls, news of a lost worker, a new connection)
  are *urgent*: any thread that waits for events runs them, whatever the limit. A task may block
  unseen, as in PyTorch's ``wait_all``, until an urgent task completes what it waits for.
* A thread has no PyTorch modes when a task begins: modes that a task leaves behind are ended. And
  each task has a Python context of its own: variables that it sets are unset for the next.
* If the system refuses a thread, for instance at a container's limit, the existing threads go on,
  and the timer thread retries until there is one.
* No exception ends a thread, whatever its type: tasks answer calls with what user code raises.

Waiting tasks have one queue for each sender, served in turn. A worker that sends ten thousand calls
at once fills its own queue; another worker's single call is next but one. The queues are bounded. A
task that does not fit is refused, and the caller of ``offer`` tells the sender.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from time import monotonic
from typing import Any
from weakref import ref

from torchweft.engine.threads.reports import log_exception
from torchweft.engine.threads.thread_modes import (
    THREADS,
    count_threads,
    end_modes,
)
from torchweft.free_threading import LONGEST_WAIT_S

Task = tuple[Callable[..., None], Any, Any]

OWN = -1
"""The sender of this worker's own tasks."""

LAST = -2
"""The sender of tasks that run only when no other sender has a task."""

SWEEP_LIMIT = 256
"""Number of senders from which empty queues are dropped before another queue is added."""


class _SenderQueue:
    """The waiting tasks of one sender, each with its size in bytes."""

    __slots__ = ("size_bytes", "tasks")

    def __init__(self) -> None:
        self.tasks: deque[tuple[Task, int]] = deque()
        self.size_bytes = 0


class FairQueue:
    """Tasks by sender, taken from the senders in turn. Thread-safe.

    Args:
        limit: How many offered tasks of one sender may wait.
        limit_bytes: Limit of their total size.
        kept: Senders whose tasks finalizers append; their queues are never dropped.
    """

    def __init__(
        self, limit: int, limit_bytes: int, kept: frozenset[int] = frozenset({OWN})
    ) -> None:
        self.ready: deque[int] = deque()
        """The senders with waiting tasks, in turn; empty if no task waits."""
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._kept = kept
        # Queues for finalizers exist from the start: a finalizer may run during a sweep.
        self._queues = {sender: _SenderQueue() for sender in kept}
        self._sweep_at = SWEEP_LIMIT
        # Reentrant: a finalizer may run, and append a task, while the lock is held.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        with self._lock:
            return sum([len(queue.tasks) for queue in self._queues.values()])

    def append(self, task: Task, sender: int = OWN, size_bytes: int = 0) -> None:
        """Appends a task of a sender, regardless of the limits."""
        self.offer(task, sender, size_bytes, is_bounded=False)

    def _add(self, sender: int) -> _SenderQueue:
        # Each life of a worker is a separate sender, and the empty queues of past lives would
        # accumulate. Dropping a queue as soon as it is empty would slow down every call.
        if len(self._queues) >= self._sweep_at:
            for key in self._queues.keys() - self._kept:
                if not self._queues[key].tasks:
                    del self._queues[key]
            self._sweep_at = max(SWEEP_LIMIT, 2 * len(self._queues))
        added = self._queues[sender] = _SenderQueue()
        return added

    def offer(self, task: Task, sender: int, size_bytes: int, *, is_bounded: bool = True) -> bool:
        """Appends a task of a sender; returns False if that would exceed the limits.

        A sender without waiting tasks may add a task of any size.
        """
        with self._lock:
            waiting = self._queues.get(sender) or self._add(sender)
            tasks = waiting.tasks
            size_bytes_after = waiting.size_bytes + size_bytes
            is_full = len(tasks) >= self._limit or size_bytes_after > self._limit_bytes
            if tasks and is_bounded and is_full:
                return False
            tasks.append((task, size_bytes))
            waiting.size_bytes = size_bytes_after
            if len(tasks) == 1:
                self.ready.append(sender)
        return True

    def popleft(self) -> Task:
        """Takes the first task of the sender whose turn it is.

        Raises:
            IndexError: No task waits.
        """
        with self._lock:
            sender = self.ready.popleft()
            if sender == LAST and self.ready:
                self.ready.append(sender)
                sender = self.ready.popleft()
            waiting = self._queues[sender]
            task, size_bytes = waiting.tasks.popleft()
            waiting.size_bytes -= size_bytes
            if waiting.tasks:
                self.ready.append(sender)
            return task


_log = logging.getLogger("torchweft")

_READ = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
_WRITE = select.EPOLLOUT | select.EPOLLONESHOT
# Without EPOLLONESHOT a closed connection would be reported over and over while paused.
_PAUSED = select.EPOLLONESHOT
_CLOSED = -1  # A late write to it fails; another file may get the old number.
_SPARE_THREADS = 4
_LOOKS_UNTIL_STUCK = 10

Parts = Callable[[], Sequence[Any]]
"""Returns the open calls, and the ``Wait`` of anything else, that a thread waits for. Called by
other threads, for reports. Does not block. What has ended by now is left out."""


class Reactor:
    """Waits for events on many descriptors with many threads, and runs tasks on them.

    Args:
        name: Prefix of the threads' names.
        limit: Number of tasks that run at a time.
        tasks: The waiting tasks.
    """

    def __init__(self, name: str, limit: int, tasks: FairQueue) -> None:
        self.tasks = tasks
        self.urgent: deque[Task] = deque()
        self._name = name
        self.limit = limit
        """Number of tasks that run at a time; tasks that wait for other workers do not count."""
        self._extra = 0
        self._epoll = select.epoll()
        self.epoll_fd = self._epoll.fileno()
        """Where its threads wait for events."""
        self._handlers: dict[int, Callable[[], None]] = {}
        self._arms: dict[int, Callable[[], object]] = {}
        """What arms a descriptor, where that is not ``epoll`` alone."""
        self.unarmed: dict[int, float] = {}
        """Descriptors that were left unarmed, for their handlers or the timer thread, and when.
        Whoever takes one out must arm it."""
        self._is_arming = False
        """Whether ``arm_if_left`` is due."""
        self._left_s = 0.0
        """When the latest descriptor was left unarmed."""
        self._lock = threading.RLock()
        self._threads: set[threading.Thread] = set()
        self._started = 0
        self._waiting = 0
        self.running = 0
        """Number of tasks that run now, without tasks that wait for other workers."""
        self._running_urgent = 0
        self._idling = 0
        self.activity = 0
        """A number that changes whenever a task ends."""
        self._completed_at_last_look = -1
        self._stalled_looks = 0
        self._is_watched = False
        self._lacks_thread = False
        self.on_queued: Callable[[], None] = lambda: None
        """Called when tasks begin to wait; must have ``help_if_stalled`` called soon."""
        self.on_unarmed: Callable[[], None] = lambda: None
        """Called when descriptors or output begin to wait; ``arm_if_left`` must follow soon."""
        self.held: dict[Any, Any] = {}
        """Output held back while short tasks run."""
        self.on_pause: Callable[[], None] = lambda: None
        """Called when tasks have ended or are about to take long; must release all of ``held``."""
        self.before_task: Callable[[], Any] | None = None
        """Called before each task, in its thread, if set."""
        self.after_task: Callable[[Any], None] = lambda begun: None
        """Called after each task with the result of ``before_task``. Neither may raise."""
        self.notes: dict[int, ref[Waiting]] = {}
        """What threads wait for, by thread."""
        self.is_closing = False
        """Whether ``close`` has begun."""
        self._local = threading.local()
        # Edge-triggered and never read: each write wakes one waiting thread.
        self.wake_fd = os.eventfd(0)
        """Written to wake one waiting thread, which looks at the queues."""
        self._epoll.register(self.wake_fd, select.EPOLLIN | select.EPOLLET)
        # Level-triggered and written once: wakes all threads.
        self._close_fd = os.eventfd(0)
        self._epoll.register(self._close_fd, select.EPOLLIN)
        self._spawn()

    @property
    def busy(self) -> int:
        """Number of tasks that run or wait to run."""
        running = self.running + self._running_urgent - self._idling
        return running + len(self.tasks) + len(self.urgent)

    @contextlib.contextmanager
    def idling(self) -> Iterator[None]:
        """Excludes this urgent task from ``busy`` meanwhile: its wait may never end."""
        with self._lock:
            self._idling += 1
        try:
            yield
        finally:
            with self._lock:
                self._idling -= 1

    # Descriptors

    def watch_reading(
        self, fd: int, handler: Callable[[], None], arm: Callable[[], object] | None = None
    ) -> None:
        """Has ``handler`` called, on one thread, when ``fd`` is readable; then ``fd`` is paused.

        If the handler leaves ``fd`` unarmed, the same thread calls it again after the tasks that
        the event brought.

        Args:
            fd: The descriptor.
            handler: Called without arguments.
            arm: Arms ``fd`` at ``epoll_fd``, if that takes more than its next event.
        """
        self._handlers[fd] = handler
        self._epoll.register(fd, _READ)
        if arm is not None:
            self._arms[fd] = arm
            arm()

    def resume_reading(self, fd: int) -> None:
        """Arms ``fd`` for one more event."""
        arm = self._arms.get(fd)
        if arm is not None:
            arm()
            return
        try:
            self._epoll.modify(fd, _READ)
        except (OSError, ValueError):
            pass  # Forgotten or closed meanwhile. ``suppress`` costs more than the call itself.

    def watch_writing(self, fd: int, handler: Callable[[], None]) -> None:
        """Registers ``fd``; ``handler`` is called once after each ``resume_writing``."""
        self._handlers[fd] = handler
        self._epoll.register(fd, _PAUSED)

    def resume_writing(self, fd: int) -> None:
        """Arms ``fd`` for one event when it can be written."""
        with contextlib.suppress(OSError, ValueError):
            self._epoll.modify(fd, _WRITE)

    def forget(self, fd: int) -> None:
        """Stops watching ``fd``, before it is closed."""
        self._handlers.pop(fd, None)
        self._arms.pop(fd, None)
        self.unarmed.pop(fd, 0)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    # Descriptors left unarmed
    #
    # A descriptor is *armed* while its next event wakes a thread. From that event on one thread has
    # it. That thread arms it again, or leaves it in ``unarmed``. Then the same thread calls its
    # handler once more, after the tasks that the event has brought. If these take longer, another
    # thread arms it. The one that takes it out of ``unarmed``, in one step (``pop``), has it.

    def leave_unarmed(self, fd: int) -> None:
        """Leaves the arming of ``fd`` to its handler, which is called again after the tasks."""
        self._left_s = self.unarmed[fd] = monotonic()
        if not self._is_arming:  # Last: ``arm_if_left`` sees the entry, or this sees its end.
            self._is_arming = True
            self.on_unarmed()

    def arm(self, fd: int) -> None:
        """Arms ``fd`` if it was left unarmed, and no other thread has taken it since."""
        if self.unarmed.pop(fd, 0):
            self.resume_reading(fd)

    def arm_all(self) -> None:
        """Arms all unarmed descriptors: this thread is about to take longer."""
        if self.held:
            self.on_pause()
        for fd in self.unarmed.copy():
            self.arm(fd)

    def arm_if_left(self, before_s: float) -> bool:
        """Arms the descriptors that were left unarmed before a time; returns whether to look again.

        Returns True for as long as calls arrive: waking the timer thread for each would cost more.
        """
        self._is_arming = False  # First: what is left from now on may not be seen below.
        if self.held:
            self.on_pause()
        for fd, left_s in self.unarmed.copy().items():
            # If it differs, it was taken and left again since.
            if left_s <= before_s and self.unarmed.get(fd) == left_s:
                self.arm(fd)
        looks_again = self._left_s > before_s
        if looks_again:
            self._is_arming = True
        return looks_again

    # Tasks

    def submit(self, function: Callable[..., None], first: Any = None, second: Any = None) -> None:
        """Runs ``function(first, second)`` soon, as an urgent task. Never blocks."""
        self.urgent.append((function, first, second))
        self.wake()

    def submit_task(self, function: Callable[..., None], first: Any = None) -> None:
        """Runs ``function(first, None)`` as a task that counts against the limit."""
        self.tasks.append((function, first, None))
        self.wake()

    def wake(self) -> None:
        """Wakes one waiting thread to look at the queue."""
        try:
            os.eventfd_write(self.wake_fd, 1)
        except (OSError, ValueError):
            pass  # closed

    def waiting(self, parts: Parts = list, *, needs_any: bool = False) -> Waiting:
        """Returns a block in which this thread blocks in a remote wait: another task may run.

        Args:
            parts: What it waits for; by default nothing that reports have a name for.
            needs_any: Whether any of the parts lets the thread go on.
        """
        return Waiting(self, parts, needs_any)

    def begin_wait(self) -> bool:
        """Stops counting this thread as running a task, before it blocks in a remote wait.

        Returns:
            Whether it was counted; then ``end_wait`` must follow.
        """
        if not getattr(self._local, "is_running", False):
            if self.urgent:
                self.wake()  # This thread may be running urgent tasks, and blocks now.
            return False
        if self.unarmed or self.held:
            self.arm_all()
        with self._lock:
            self.running -= 1
        if self.tasks.ready:
            self.wake()
        return True

    def end_wait(self) -> None:
        """Counts this thread again. For a moment there may be more than the limit."""
        with self._lock:
            self.running += 1

    def begin_read(self) -> bool:
        """Lets this thread, which handles an event, wait for one descriptor alone.

        Returns:
            Whether it may, because another thread waits for events; then ``end_read`` must follow.
        """
        with self._lock:
            if self._waiting < 2:
                return False
            self._waiting -= 1
        return True

    def end_read(self) -> None:
        """Counts this thread again among those that wait for events."""
        with self._lock:
            self._waiting += 1

    def help_if_stalled(self, open_calls: int) -> bool:
        """Wakes one more thread if tasks wait that may run, and none ended since the last look.

        Args:
            open_calls: How many answers this worker waits for. As many tasks may be blocked
                unseen, as in PyTorch's ``wait_all``. If no task ends for long, up to so many
                tasks run beyond the limit: the answers may depend on tasks that wait here.

        Returns:
            Whether to look again, because tasks wait or a thread is lacking.
        """
        if self._lacks_thread:
            self._spawn_if_possible()
        if not self.tasks.ready and not self.urgent:
            self._completed_at_last_look = -1
            self._stalled_looks = self._extra = 0
            self._is_watched = self._lacks_thread
            return self._lacks_thread
        if self.activity == self._completed_at_last_look:
            self._stalled_looks += 1
            is_stuck = self._stalled_looks % _LOOKS_UNTIL_STUCK == 0
            if is_stuck and self.running >= self.limit + self._extra and self._extra < open_calls:
                self._extra += 1
            if self.urgent or self.running < self.limit + self._extra:  # Else it could run nothing.
                self.wake()
        else:
            self._stalled_looks = 0
        self._completed_at_last_look = self.activity
        return True

    def _watch_queue(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            self.on_queued()

    # Threads

    def _spawn(self) -> None:
        with self._lock:
            if self.is_closing:
                return  # ``close`` would not join it.
            name = f"{self._name}-{self._started + 1}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._waiting += 1
            try:
                thread.start()  # within the lock: ``close`` must join only started threads
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
        is_needed = True
        while is_needed and not self.is_closing:
            for fd, _ in self._epoll.poll(LONGEST_WAIT_S, 1):
                is_needed = self._handle(fd)
                # Also if other threads have taken the tasks.
                while is_needed and fd in self.unarmed and fd in self._handlers:
                    is_needed = self._handle(fd)
                if not is_needed:
                    self.arm(fd)
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _handle(self, fd: int) -> bool:
        """Handles an event, and runs waiting tasks; returns whether this thread is still needed."""
        handler = self._handlers.get(fd)
        if handler is not None:
            try:
                handler()
            except BaseException:
                log_exception("an event could not be handled")
                self.arm(fd)
        return not (self.tasks.ready or self.urgent) or self._work()

    def _work(self) -> bool:
        """Runs waiting tasks; returns whether this thread is still needed."""
        while self.urgent or self.tasks.ready:
            if self.urgent:
                with self._lock:
                    self._running_urgent += 1
                    is_last_waiting = self._stops_waiting()
                if is_last_waiting:
                    self._spawn_if_possible()
                self._run_all(self.urgent, self.urgent)
                with self._lock:
                    self._running_urgent -= 1
                    self._waiting += 1
            elif self.begin_tasks():
                self._run_all(self.tasks, self.tasks.ready)
                self.end_tasks()
            else:
                break
            with self._lock:
                if self._waiting > _SPARE_THREADS + 1 and not (self.tasks.ready or self.urgent):
                    self._waiting -= 1
                    return False
        else:
            return True
        self._watch_queue()
        # The others run tasks that may take long: this thread must hear all connections, not only
        # look again and again at the one that it has left unarmed.
        self.arm_all()
        return True

    def begin_tasks(self) -> bool:
        """Counts this thread as one that runs tasks; returns False if as many run as may.

        Otherwise ``end_tasks`` must follow.
        """
        with self._lock:
            if self.running >= self.limit + self._extra:
                return False
            self.running += 1
            is_last_waiting = self._stops_waiting()
        if is_last_waiting:
            self._spawn_if_possible()
        local, threads = self._local, count_threads()
        if THREADS.wanted not in (0, threads):
            threads = THREADS.follow()
        local.is_running, local.threads = True, threads
        return True

    def end_tasks(self) -> None:
        """Counts this thread as one that waits for events again."""
        self._local.is_running = False
        if count_threads() != self._local.threads:
            THREADS.note(self._local.threads)
        if self.held:
            self.on_pause()
        with self._lock:
            self.running -= 1
            self._waiting += 1

    def _stops_waiting(self) -> bool:
        """Notes, in the lock, that this thread waits for no event; returns whether none does."""
        self._waiting -= 1
        return self._waiting == 0

    def _run_all(self, queue: FairQueue | deque[Task], waiting: deque[Any]) -> None:
        while waiting:
            try:
                function, first, second = queue.popleft()
            except IndexError:
                return  # Race: another thread has taken the last task.
            if waiting and not self._is_watched:
                self._watch_queue()
            before_task = self.before_task
            begun = None if before_task is None else before_task()
            try:
                Context().run(function, first, second)
            except BaseException:
                log_exception("a message could not be handled")
            if before_task is not None:
                self.after_task(begun)
            end_modes()
            self.activity += 1
            # These names must not keep objects alive after the task: remote references count.
            del function, first, second
            if self.running > self.limit + self._extra:
                return  # Other tasks came back from a wait; this thread makes room.

    def abandon(self) -> None:
        """Frees the descriptors in a forked process; takes no lock, and runs no waiting task."""
        self.is_closing = True
        self.urgent.clear()
        self.held.clear()
        self._epoll.close()
        for fd in (self.wake_fd, self._close_fd):
            os.close(fd)
        self.wake_fd = self._close_fd = _CLOSED

    def close(self, timeout_s: float) -> list[str]:
        """Ends all threads; returns the names of the threads that did not end in time.

        These run user code that does not return. They are daemons and end with the process.
        """
        self.is_closing = True
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
            wake_fd, self.wake_fd = self.wake_fd, _CLOSED
            os.close(wake_fd)
            os.close(self._close_fd)
        return stuck


class Waiting:
    """A remote wait of one thread, which notes what it waits for; made by ``Reactor.waiting``.

    The note ends with the block, also if a signal handler raises anywhere: only the block holds
    this object. A handler that waits meanwhile has a note of its own.
    """

    __slots__ = ("__weakref__", "_before", "_is_counted", "_reactor", "needs_any", "parts")

    def __init__(self, reactor: Reactor, parts: Parts, needs_any: bool) -> None:
        self._reactor = reactor
        self.parts = parts
        self.needs_any = needs_any

    def __enter__(self) -> None:
        reactor, thread = self._reactor, get_ident()
        self._is_counted = reactor.begin_wait()
        self._before = reactor.notes.get(thread)
        reactor.notes[thread] = ref(self)

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            self._reactor.notes.pop(get_ident(), None)
        else:
            self._reactor.notes[get_ident()] = self._before
        if self._is_counted:
            self._reactor.end_wait()
