"""One worker as a whole: makes, starts and ends its parts, and tells them of losses, in order."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.util import Finalize

from torch.distributed.distributed_c10d import Store

from torchweft.autograd.engine import ENGINE
from torchweft.probe import clock_id
from torchweft.rpc import serving, stack_report
from torchweft.rpc.collective import GATHERINGS, Gatherings
from torchweft.rpc.completion import key_of
from torchweft.rpc.leaving import Leaving
from torchweft.rpc.observed import OBSERVED, Observed, answer_signal
from torchweft.rpc.options import RpcBackendOptions
from torchweft.rpc.ports import PORTS, Ports
from torchweft.rpc.stream_sources import SOURCES, Sources
from torchweft.rpc.worker import WORKER, Worker
from torchweft.serialize.reading import make_reader
from torchweft.threads import reports
from torchweft.threads.reports import LongWaits, log_exception
from torchweft.worker import current as current_agent
from torchweft.worker import deaths
from torchweft.worker.agent import Agent, Slot
from torchweft.worker.calls import current_call
from torchweft.worker.peers import Peer
from torchweft.worker.process import RepeatedInterrupts, SpinLimit, hide_from_compiler
from torchweft.worker.sending import Lifetime

_log = logging.getLogger("torchweft")

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
        observed: Tells observers what it does.
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
        self.observed = Observed(self.worker, group)
        self.clock_id = clock_id()
        stack_report.install(self.worker)
        self.gatherings = Gatherings(agent)
        self.waits.add(self.worker.engine.open_waits)
        self.waits.add(self.gatherings.open_waits)
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
        agent.slots[OBSERVED] = self.observed
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
        answer_signal()
        self._interrupts.begin()
        reports.set_origin(self._origin)
        self.agent.answer_observers(self.observed.answer)
        self.agent.start(when_lost=self.peer_lost, when_disconnected=self.peer_disconnected)

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
            self.agent.cancelling.peer_lost,
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
        self.agent.cancelling.end_creations(self.worker.unfinished, peer)

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
        self.worker.replies.has_left = True
        self.agent.answer_observers(None)
        current_agent.install(None)
        self._interrupts.end()
        reports.set_origin(None)
        for end in list(self.on_end.values()):
            end()
        self.gatherings.close()
        self.worker.unseen.close()
        self.spin_limit.close()
        self.worker.references.close()
        self.sources.close(max(end_s - time.monotonic(), 0.0))
        self.worker.close(limit_s)
        self.agent.close(max(end_s - time.monotonic(), 0.0))
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
        if error.__context__ is None:
            return f"its program called sys.exit({error.code!r}); "[:_SHOWN_LENGTH]
        error = error.__context__  # So ``torch.multiprocessing`` ends a target that has raised.
    if error is None:
        return ""
    raised = type(error).__name__
    with contextlib.suppress(Exception):  # The text of an exception is code of the program.
        raised = f"{raised}: {error}".splitlines()[0][:_SHOWN_LENGTH].removesuffix(": ")
    return f"its program raised {raised}; "


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
