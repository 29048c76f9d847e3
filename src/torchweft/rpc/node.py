"""One worker as a whole: makes, starts and ends its parts, and tells them of losses, in order.

``Leaving`` takes it out of its group: the shell of ``torchweft.engine.protocol.leaving``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.util import Finalize

from torch.distributed.distributed_c10d import Store

from torchweft import deaths
from torchweft.autograd.engine import ENGINE
from torchweft.engine.codec.reading import make_reader
from torchweft.engine.protocol import leaving
from torchweft.engine.protocol.calls import has_awaited
from torchweft.engine.protocol.observing import SHUTDOWN, Wait
from torchweft.engine.protocol.registration import LEADER
from torchweft.engine.threads import reports
from torchweft.engine.threads.reports import Following, Lacking, LongWaits, log_exception, names_of
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import Kind, decode_step, encode_texts
from torchweft.engine.worker import current as current_agent
from torchweft.engine.worker.agent import Agent, Slot
from torchweft.engine.worker.calls import current_call
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.process import RepeatedInterrupts, SpinLimit, hide_from_compiler
from torchweft.engine.worker.sending import Lifetime
from torchweft.errors import ShutdownError
from torchweft.probe import clock_id
from torchweft.rpc import serving
from torchweft.rpc.collective import GATHERINGS, Gatherings
from torchweft.rpc.options import RpcBackendOptions
from torchweft.rpc.ports import PORTS, Ports
from torchweft.rpc.reporter import REPORTER, Reporter, write_report_on_signal
from torchweft.rpc.serving import key_of
from torchweft.rpc.sources import SOURCES, Sources
from torchweft.rpc.worker import WORKER, Worker

_log = logging.getLogger("torchweft")

_PROBE_PAUSE_S = 0.005
_POLL_S = 0.002
_CAUSE_LENGTH = 512
_SIGNAL_S = 1.0
"""The longest wait: it delays the handler of a signal that arrived just before it began."""


class Leaving:
    """Takes one worker out of its group, and does its part while others leave. Thread-safe.

    Args:
        worker: The worker.
        waits: Logs a wait that takes long.
        on_settling: Called when no worker needs this one any more, before another one may leave.
        on_left: Called when the wait for leaving has ended, successfully or not.
    """

    def __init__(
        self,
        worker: Worker,
        waits: LongWaits,
        on_settling: Callable[[], None] = lambda: None,
        on_left: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._agent = agent = worker.agent
        self._waits = waits
        self._on_settling = on_settling
        self._on_left = on_left
        self._lock = threading.Lock()
        self._machine: leaving.Leaving = leaving.ClosedLeaving()
        if agent.members.is_open:
            self._machine = leaving.OpenLeaving()
        elif agent.me.id == LEADER:
            self._machine = leaving.Leader(set(agent.peers))
        self._changed = threading.Event()
        self._probe_at_s = math.inf
        self._is_settling_due = self._is_settling = False
        self._notes_held = False
        self._left: leaving.Left | None = None
        self._causes: dict[int, str] = {}  # Of the workers that rank 0 knows to be lost.
        self.held: list[str] = []
        """Lines that name the references which the program still held when they were dropped."""
        agent.receiver.on(Kind.SHUTDOWN, self._on_message, inline=True)
        agent.members.on_joined(self._on_member)

    def wait(
        self, timeout: float, *, notes_held: bool = False, follow: Following | None = None
    ) -> ShutdownError | None:
        """Blocks until this worker may leave, or the time is up; returns the error, if any.

        Args:
            timeout: Seconds to wait at most; 0 for no limit.
            notes_held: Whether to record in ``held`` the references that are dropped while in use.
            follow: Follows the wait; by default a long wait is logged.
        """
        self._notes_held = notes_held
        began_s = time.monotonic()
        end_s = began_s + timeout if timeout else math.inf
        follow = follow or self._waits.during_shutdown
        try:
            with follow(self.lacking):
                self._feed(self._machine.begin)
                for peer in list(self._agent.peers.values()):
                    self._on_member(peer)
                with self._agent.reactor.waiting(partial(self._shown, began_s)):
                    is_over = self._await_end(end_s)
                if not is_over:
                    return self._late(timeout)
        finally:
            self._on_left()
        return self._outcome()

    def _outcome(self) -> ShutdownError | None:
        assert self._left is not None
        lost = [self._agent.peers[worker].lost_error() for worker in self._left.lost]
        if not lost:
            self._report_leaks()
            return None
        told = "; ".join(map(str, lost))
        names = tuple(error.worker for error in lost)
        return ShutdownError(f"shut down without every worker: {told}", missing=names)

    def _await_end(self, end_s: float) -> bool:
        """Waits until the machine lets this worker leave; returns False if the time is up."""
        while self._left is None:
            now_s = time.monotonic()
            if now_s >= end_s:
                return False
            self._changed.clear()
            if self._is_settling_due:
                self._settle()
            if now_s >= self._probe_at_s:
                self._probe_at_s = math.inf
                self._feed(self._machine.probe_again)
            left_s = min(end_s, self._probe_at_s) - now_s
            if self._machine.is_watched:
                if not self._look():
                    self._changed.wait(min(_POLL_S, left_s))
            elif self._left is None:
                self._changed.wait(min(_SIGNAL_S, left_s))
        return True

    def _shown(self, began_s: float) -> list[Wait]:
        """Returns what the thread in ``wait`` waits for."""
        age_s, workers = time.monotonic() - began_s, self.lacking().workers
        return [] if self._left else [Wait(SHUTDOWN, "", age_s, "shutdown", workers)]

    def lacking(self) -> Lacking:
        """Returns the awaited workers, and the reason."""
        with self._lock:
            what, workers = self._machine.missing()
        names = tuple(self._agent.peers[worker].name for worker in workers)
        return Lacking(f"{names_of(names) if names else 'it'} {what}", names)

    def _late(self, timeout: float) -> ShutdownError:
        """Returns the error of a shutdown whose time is up; names the awaited workers."""
        lacking = self.lacking()
        return ShutdownError(
            f"graceful shutdown of worker {self._agent.info.name!r} took longer than "
            f"{timeout:.1f} s; {lacking.text}",
            missing=lacking.workers,
        )

    # Events

    def _feed(self, event: Callable[[], list[leaving.Action]]) -> bool:
        """Feeds an event to the machine and runs its actions; returns whether there were any."""
        with self._lock:
            actions = event()
        for action in actions:
            self._act(action)
        self._changed.set()
        return bool(actions)

    def peer_lost(self, peer: Peer) -> None:
        """Continues without a lost worker; a closed group ends if its leader is lost."""
        self._feed(lambda: self._machine.member_lost(peer.id))

    def peer_disconnected(self, peer: Peer) -> None:
        """Notes that a connection has ended after the group had gone quiet."""
        self._feed(lambda: self._machine.connection_ended(peer.id))

    def _on_message(self, peer: Peer, frame: Frame) -> None:
        step, arguments, causes = decode_step(frame.control)
        if step == leaving.Step.CLOSE and peer.id == LEADER:
            self._causes = dict(zip(arguments, causes, strict=False))
        self._feed(lambda: self._machine.received(peer.id, step, arguments))

    def _on_member(self, peer: Peer) -> None:
        if peer.is_self or peer.lost is not None:
            return
        with self._lock:
            actions = self._machine.member_present(peer.id)
        for action in actions:
            assert isinstance(action, leaving.Send)
            self._tell(peer, action)  # Not ``_act``: the agent may not have the peer yet.
        if peer.lost is not None:  # Race: the machine may have heard of the loss too early.
            self.peer_lost(peer)

    # Actions

    def _act(self, action: leaving.Action) -> None:
        agent = self._agent
        if isinstance(action, leaving.Send):
            self._tell(agent.peers[action.to], action)
        elif isinstance(action, leaving.Look):
            self._look()
        elif isinstance(action, leaving.ProbeLater):
            self._probe_at_s = time.monotonic() + _PROBE_PAUSE_S
        elif isinstance(action, leaving.Retire):
            peer = agent.peers[action.worker]
            peer.depart()
            agent.members.retire(peer)
        elif isinstance(action, leaving.Watch):
            agent.reactor.submit(self._watch)
        elif isinstance(action, leaving.ExpectEnds):
            agent.lifetime.is_leaving = True
        elif isinstance(action, leaving.BeginSettling):
            self._is_settling_due = True  # The waiting thread does it, as it may take a while.
        elif isinstance(action, leaving.Lose):
            peer = agent.peers[action.worker]
            agent.leave_behind(peer, "end of file during shutdown")
            self._worker.references.peer_lost(peer)
        elif isinstance(action, leaving.Left):
            known = tuple(worker for worker in action.lost if worker in agent.peers)
            for worker in known:
                # Its session may be broken and not yet given up: it cannot read the farewell.
                cause = self._causes.get(worker)
                says = f"rank 0 says: {cause}" if cause else "rank 0 says so"
                agent.leave_behind(agent.peers[worker], says)
            self._left = leaving.Left(known)

    def _tell(self, peer: Peer, action: leaving.Send) -> None:
        step, arguments = action.step, action.arguments
        tail = b""
        if step is leaving.Step.CLOSE:
            tail = encode_texts([self._cause(worker) for worker in arguments])
        values = (step, len(arguments), *arguments)
        self._agent.sender.post_ints(peer, Kind.SHUTDOWN, *values, tail=tail)

    def _cause(self, worker: int) -> str:
        """Returns why a worker is lost, for the other workers: they may not have heard of it."""
        lost = self._agent.peers[worker].lost
        return (lost.cause or "")[:_CAUSE_LENGTH] if lost is not None else ""

    def _watch(self, _: object, __: object) -> None:
        """Connects to all workers, so that a death before ``shutdown`` is noticed."""
        with self._agent.reactor.idling():
            self._agent.connect_all(self._agent.peers.values(), self.peer_lost)

    def _look(self) -> bool:
        """Reports this worker's state to the machine; returns whether actions followed."""
        agent, references = self._agent, self._worker.references
        if self._is_settling:
            references.flush()
        is_idle = not (
            len(agent.calls)
            or agent.reactor.busy
            or self._worker.unfinished
            or has_awaited(list(agent.peers.values()))
        )
        report = leaving.Report(is_idle, agent.reactor.activity + agent.calls.total)
        is_settled = self._is_settling and references.is_settled()
        return self._feed(lambda: self._machine.observed(report, is_settled=is_settled))

    def _settle(self) -> None:
        """Drops all references."""
        self._is_settling_due = False
        self._on_settling()
        if self._notes_held:
            self.held = self._worker.references.report_held()
        self._worker.references.begin_settling()
        self._is_settling = True

    def _report_leaks(self) -> None:
        """Logs leaked references; a settled closed group should have none."""
        if not self._agent.members.is_open:
            for line in self._worker.references.report_leaks():
                _log.warning("a reference was not released: %s", line)


END_LIMIT_S = 5.0
_UNASKED_LIMIT_S = 0.3
_SHOWN_LENGTH = 160


class Node:
    """The parts of one worker.

    Args:
        agent: Its connections, threads and open calls; not started yet.
        options: The options of the worker.
        store: The store through which the workers found each other. Rank 0 may host it, so it
            must live for as long as others may still read from it.
        on_left: Called with the store when the wait for leaving the group has ended, successfully
            or not.
        group: The name of the group for observers.

    Attributes:
        agent: Its connections, threads and open calls.
        options: Its options.
        worker: Its calls, references, tensors and autograd engine.
        gatherings: The barriers and gathers that it takes part in.
        leaving: Takes it out of the group.
        waits: Logs waits that take long.
        reporter: Tells observers what it does.
        clock_id: The id of its clock. Read at once: calls of other workers open no file.
        spin_limit: Makes idle threads of OpenMP sleep.
        store: The store; None once the worker has ended, or its closed group is about to.
        on_end: What ends with the worker, in any order: functions by any key.
    """

    def __init__(
        self,
        agent: Agent,
        options: RpcBackendOptions,
        store: Store,
        on_left: Callable[[Store], None] = lambda store: None,
        group: str = "",
    ) -> None:
        self.agent = agent
        self.options = options
        self.store: Store | None = store
        self._on_left = on_left
        self.on_end: dict[object, Callable[[], None]] = {}
        name = agent.info.name
        self.waits = LongWaits(name)
        self.spin_limit = SpinLimit(f"weft-{name}-openmp")
        agent.timers.add(self.waits.tick)
        agent.timers.add(self.spin_limit.tick)
        self._interrupts = RepeatedInterrupts(agent.timers)
        self.worker = Worker(
            agent,
            options.reference_type,
            make_reader(options.allowed_modules, options.strict, name, options.callables),
            copies_own=options.copy_to_self,
            warns_of_lost_gradients=options.lost_gradients == "warn",
        )
        serving.install(self.worker)
        self.reporter = Reporter(self.worker, group)
        self.clock_id = clock_id()
        self.gatherings = Gatherings(agent, self.waits)
        self.waits.add(self.worker.engine.open_waits)
        self.ports = Ports(self.worker)
        self.sources = Sources(agent)
        self.leaving = Leaving(self.worker, self.waits, self._close_store, self._note_left)
        self.waits.on_notice = partial(agent.events.note, "%s")
        agent.members.on_joined(self._note_joined)
        self._finalize: Finalize | None = None
        # For functions that programs and other workers call.
        agent.slots[ENGINE] = self.worker.engine
        agent.slots[WORKER] = self.worker
        agent.slots[GATHERINGS] = self.gatherings
        agent.slots[NODE] = self
        agent.slots[REPORTER] = self.reporter
        agent.slots[PORTS] = self.ports
        agent.slots[SOURCES] = self.sources

    def start(self) -> None:
        """Makes this the worker of the process, and begins to serve others."""
        current_agent.install(self.agent)
        hide_from_compiler()
        # Tells the other workers at exit. Otherwise they would notice when the connections end,
        # after all modules have been torn down: a second or more on a busy machine. Also runs when
        # a process of ``multiprocessing`` ends; after exit handlers of the program, which may
        # include the shutdown.
        self._finalize = Finalize(None, self._end_unasked, exitpriority=0)
        write_report_on_signal()
        self._interrupts.begin()
        reports.set_origin(self._origin)
        self.agent.answer_observers(self.reporter.answer)
        self.agent.when_lost = self.peer_lost
        self.agent.when_disconnected = self.peer_disconnected
        self.agent.start()

    def peer_lost(self, peer: Peer) -> None:
        """Tells all parts that a worker is lost, in this order, as one task.

        ``Agent.lose`` has already declared the worker lost, ended its connection and failed the
        open calls to it. Waits for the worker come first, so that a program learns of the loss as
        soon as possible; values and shutdown come next. Applications and callbacks of
        ``on_worker_lost`` come last, each as a task of its own, because they may block.
        """
        worker = self.worker
        self._tell(
            peer,
            worker.tensor_messages.peer_lost,
            self.gatherings.peer_lost,
            worker.engine.peer_lost,
            self.agent.calls.caller_lost,
            self.sources.peer_lost,
            worker.references.peer_lost,
            self._cancel_creations,
            self.leaving.peer_lost,
            partial(_warn, self.agent.lifetime),
            self.agent.tell_watchers,
        )

    def _note_joined(self, peer: Peer) -> None:
        self.agent.events.note("worker %r is known", peer.name)

    def _close_store(self) -> None:
        # A worker that leaves may join the next group at the same address. It must not find the
        # store of this one, which would end while it is in use.
        if not self.agent.members.is_open:
            self.store = None

    def _note_left(self) -> None:
        if self.store is not None:
            self._on_left(self.store)

    def peer_disconnected(self, peer: Peer) -> None:
        """Tells the parts that a connection has ended while the group is leaving."""
        self._tell(
            peer, self.worker.tensor_messages.peer_disconnected, self.leaving.peer_disconnected
        )

    def _tell(self, peer: Peer, *parts: Callable[[Peer], None]) -> None:
        """Calls all of ``parts``; logs the errors of parts, which may run code of the program."""
        for tell in parts:
            try:
                tell(peer)
            except BaseException:
                log_exception("a handler for the loss of worker %r failed", peer.name)

    def _cancel_creations(self, peer: Peer) -> None:
        self.agent.calls.end_creations(self.worker.unfinished, peer)

    def end(self, limit_s: float | None = None, farewell: str = "") -> None:
        """Ends this worker at once: open waits get an error.

        Args:
            limit_s: Seconds within which it ends, approximately, regardless of functions of the
                program and of other workers; by default ``END_LIMIT_S``.
            farewell: The reason, for workers that do not expect it to leave.
        """
        limit_s = END_LIMIT_S if limit_s is None else limit_s
        end_s = time.monotonic() + limit_s
        finalize, self._finalize = self._finalize, None
        if finalize is not None:
            finalize.cancel()
        self.agent.links.leave_reason = farewell
        self.worker.has_left = True
        self.agent.answer_observers(None)
        current_agent.install(None)
        self._interrupts.end()
        reports.set_origin(None)
        for end in list(self.on_end.values()):
            end()
        self.gatherings.close()
        self.worker.unseen.close()
        self.worker.references.close()
        self.sources.close(max(end_s - time.monotonic(), 0.0))
        self.worker.close(limit_s)
        self.agent.close(max(end_s - time.monotonic(), 0.0))
        self.spin_limit.close()
        self.store = None  # A kept future or reference keeps this worker, but no server.

    def _origin(self) -> reports.Origin:
        """Returns the origin of a log record."""
        call = current_call.get()
        told = "" if call is None else key_of(call)
        return reports.Origin(self.agent.info.name, told)

    def _end_unasked(self) -> None:
        """Leaves when the interpreter ends, if the program has not done so before."""
        self.end(_UNASKED_LIMIT_S, f"{_program_end()}its process ended without shutdown()")


def _program_end() -> str:
    """Returns how the program has ended, for a text about its process; empty if it returned."""
    # ``multiprocessing`` calls finalizers while the exception of its target is on the way.
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # At a prompt, the error may be old.
        error = getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        if not error.code:
            return ""
        # ``torch.multiprocessing`` so ends a target that has raised.
        error = error.__context__ or error
    return "" if error is None else f"{how_ended(error)}; "


def how_ended(error: BaseException) -> str:
    """Returns in a line how a program has ended that an error ended."""
    if isinstance(error, SystemExit):
        return f"its program called sys.exit({error.code!r})"[:_SHOWN_LENGTH]
    if isinstance(error, KeyboardInterrupt):
        return "its program was interrupted"
    raised = type(error).__name__
    with contextlib.suppress(Exception):  # The text of an exception is code of the program.
        raised = f"{raised}: {error}".splitlines()[0][:_SHOWN_LENGTH].removesuffix(": ")
    return f"its program raised {raised}"


def _warn(lifetime: Lifetime, peer: Peer) -> None:
    """Logs a loss: a worker that runs its own code, and waits for no other one, would not hear."""
    if not (peer.has_left or lifetime.has_failed or deaths.are_told_by_launcher()):
        _log.warning("%s", peer.lost)


NODE: Slot[Node] = Slot()


def current_node() -> Node:
    """Returns this process's worker, with all its parts.

    Raises:
        NotInitialized: This process is not a worker.
    """
    return current_agent.current().slots[NODE]
