"""Follows a publisher, and takes its versions over into a module of this worker."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft import memory
from torchweft.arguments import wrong_type
from torchweft.closing import Closing
from torchweft.errors import CallTimeout, ConfigurationError, NotInitialized, WorkerLost
from torchweft.extending import check_called, ignore_errors, run_in_background, this_worker
from torchweft.rpc import Future, RRef, on_worker_lost
from torchweft.weights import delta
from torchweft.weights.delta import DeltaError
from torchweft.weights.layout import Layout, Source, check_same, prepare, tensors_of
from torchweft.weights.publisher import Inbox, Publisher, Sent, announce, words_of
from torchweft.weights.versions import Following, Version

_log = logging.getLogger("torchweft")


@dataclass
class Taken:
    """Counts of one subscriber.

    Attributes:
        versions: Versions that were taken over.
        shared: Versions that came without a copy.
        wholes: Versions that came as whole copies.
        deltas: Versions that came as deltas.
        refused: Deltas that did not apply; whole weights were fetched instead.
        longest_update_s: Seconds of the longest ``update``, without waiting for a version.
    """

    versions: int = 0
    shared: int = 0
    wholes: int = 0
    deltas: int = 0
    refused: int = 0
    longest_update_s: float = 0.0


class _Ready(NamedTuple):
    """A whole version, and its tensors by name."""

    memory: Tensor
    is_shared: bool
    values: dict[str, Tensor]


class Subscriber(Closing):
    """Has the newest version of a publisher at hand, and puts it into a module when asked.

    Versions are fetched by a thread that lives for one fetch, while the module is in use.
    ``update`` then swaps pointers: each parameter uses the memory of the version, which on one host
    all subscribers share, so it must not be written. Buffers are copied, as modules write them.
    When the publisher is lost, the module keeps its version, see ``lost``. Thread-safe, except that
    the module must not be in use during ``update``.

    Args:
        publisher: A reference to the ``Publisher``, or the publisher itself.
        module: The module, or a dict of tensors, with the names, shapes and types that are
            published. Each ``update`` changes the tensors that it has then.
        in_place: Copies parameters too, into the memory that they have. Needed if they are trained,
            captured in a CUDA graph, or shared with another process; always so on other devices,
            and for the tensors of a dict.
        timeout: Seconds for each call of the publisher; 0 for no limit.

    Raises:
        WeightsMismatch: The module has other tensors than the publisher; names the first.
        WorkerLost: The publisher's worker is lost.
        NotAllowed: This worker is strict, or has allowed modules, and refuses announcements of
            versions; names the option.
    """

    def __init__(
        self,
        publisher: RRef[Publisher] | Publisher,
        module: Source,
        *,
        in_place: bool = False,
        timeout: float = 300.0,
    ) -> None:
        self._worker = this_worker().name
        _check_publisher(publisher)
        self._module = module
        self._in_place = in_place
        self._timeout_s = timeout
        self._changed = threading.Condition()
        self._updating = threading.Lock()
        self._following = Following()
        self._fetch: _Fetch | None = None
        self._keeps_memory = False
        self._ready: _Ready | None = None
        self._memory: Tensor | None = None
        self._error: Exception | None = None
        self._is_closed = False
        self._counts = Taken()
        self.lost: WorkerLost | None = None
        """The loss of the publisher; None while it lives."""
        self._layout: Layout
        self._inbox = RRef(Inbox(self))
        self._publisher: RRef[Publisher] | None = None
        self._asked = -1
        """Id of the worker whose publisher was asked last."""
        self._finalize: weakref.finalize[..., Subscriber] | None = None
        self._subscribe(publisher, self._targets())

    # The publisher

    def follow(self, publisher: RRef[Publisher] | Publisher) -> None:
        """Follows another publisher from now on, for instance a restarted one. Blocks for a call.

        The version in use stays until that publisher has one; its numbers may be smaller.

        Raises:
            WeightsMismatch: It publishes other tensors; the former publisher is followed.
            WorkerLost: Its worker is lost.
            ConfigurationError: This subscriber is closed.
        """
        _check_publisher(publisher)
        self._check_open()
        self._subscribe(publisher, self._targets())

    def _targets(self) -> dict[str, Tensor]:
        """Returns the tensors of the module now: a module may put others in their place."""
        return tensors_of(self._module)

    def _subscribe(
        self, publisher: RRef[Publisher] | Publisher, targets: dict[str, Tensor]
    ) -> None:
        reference = RRef(publisher) if isinstance(publisher, Publisher) else publisher
        if not reference.is_owner():
            # A publisher forgets a subscriber whose worker refuses to be told of versions.
            check_called(announce)
        calls = reference.rpc_sync(timeout=self._timeout_s)
        # Before the call: an announcement may outrun its answer.
        self._asked = reference.id.owner
        terms = calls.subscribe(self._inbox)
        try:
            self._check(terms.layout, targets)
        except BaseException:
            if reference is not self._publisher:
                ignore_errors(reference.rpc_async().unsubscribe(self._inbox))
            raise
        with self._changed:
            if self._finalize is not None:
                self._finalize()
            forget = on_worker_lost(
                functools.partial(_tell_loss, weakref.ref(self), reference.owner_name())
            )
            self._finalize = weakref.finalize(self, _end, forget, reference, self._inbox)
            self._finalize.atexit = False
            self._publisher = reference
            self._keeps_memory = terms.has_deltas
            self._layout = terms.layout
            self._abandon_fetch()
            self.lost = self._error = None
            self._go_on(self._following.followed(terms.publisher))
        if terms.newest is not None:
            self.announced(terms.newest)

    def _check(self, layout: Layout, targets: dict[str, Tensor]) -> None:
        check_same(layout, targets, None, f"the subscriber's state on {self._worker!r}")

    def follows(self, worker: int) -> bool:
        """Returns whether this subscriber follows a publisher of a worker, or asks to do so."""
        publisher = self._publisher
        return worker == self._asked or (publisher is not None and publisher.id.owner == worker)

    def announced(self, version: Version) -> None:
        """The publisher has a version; called by its worker."""
        with self._changed:
            self._go_on(self._following.announced(version))

    def _go_on(self, is_fetch_due: bool) -> None:
        """Starts the next fetch; under the lock."""
        if not is_fetch_due or self._is_closed or self._publisher is None:
            return
        self._following.fetching()
        self._fetch = _Fetch(self, self._publisher, f"weft-{self._worker}-weights")
        self._fetch.start()

    def _abandon_fetch(self) -> _Fetch | None:
        """Drops the answer to a fetch that is under way, and returns it; under the lock."""
        fetch, self._fetch = self._fetch, None
        if fetch is not None and fetch.call is not None:
            fetch.call.cancel()
        return fetch

    # A fetch, in a thread of its own

    def ask(self, fetch: _Fetch, publisher: RRef[Publisher]) -> Future[Sent | None] | None:
        """Asks for a version; returns None if it is not wanted any more."""
        with self._changed:
            if fetch is not self._fetch:
                return None
            fetch.call = publisher.rpc_async(self._timeout_s).fetch(self._following.have)
            return fetch.call

    def arrived(self, fetch: _Fetch, sent: Sent | None) -> None:
        """Checks what was sent; the version is ready then."""
        with self._changed:
            if fetch is not self._fetch:
                return
            fetch.call = None  # It has the memory of the version.
            offer = None if sent is None else sent.offer
            is_usable = self._following.arrived(
                offer, is_shared=sent is not None and sent.is_shared
            )
            base, layout = self._memory, self._layout
            if sent is None or not is_usable:
                self._go_on(self._following.is_fetch_due)
                return
        ready = None
        try:
            found = sent.data if sent.offer.base is None else self._applied(sent, base)
            ready = _Ready(found, sent.is_shared, layout.views(found))
        except DeltaError as error:
            _log.warning("%s; whole weights are fetched", error)
        with self._changed:
            if fetch is not self._fetch:
                return
            if ready is None:
                self._counts.refused += 1
            else:
                self._ready = ready
                is_delta = sent.offer.base is not None
                self._counts.shared += sent.is_shared
                self._counts.deltas += is_delta
                self._counts.wholes += not (sent.is_shared or is_delta)
                self._changed.notify_all()
            self._go_on(self._following.checked(sent.offer.version, is_good=ready is not None))

    def _applied(self, sent: Sent, base: Tensor | None) -> Tensor:
        """Returns the version that a delta makes of another; the other stays as it is."""
        if base is None:
            raise DeltaError("a delta cannot be applied: its base is gone")
        # From the pool: ``update`` drops the former version, and would wait until the system has
        # taken back its pages.
        new = memory.pooled_empty(base.nbytes, dtype=torch.uint8)
        delta.decode(
            delta.Delta(sent.data.numpy().data, sent.checksum), words_of(base), words_of(new)
        )
        return new

    def failed(self, fetch: _Fetch, error: Exception) -> None:
        """Notes the error of a fetch, which the next ``update`` raises."""
        with self._changed:
            if fetch is not self._fetch:
                return
            fetch.call = None
            self._following.failed()
            if isinstance(error, WorkerLost):
                self.lost = error
            elif not isinstance(error, NotInitialized):  # This worker has left its group.
                self._error = error
            self._changed.notify_all()

    def _publisher_lost(self, error: WorkerLost) -> None:
        with self._changed:
            self.lost = error
            self._changed.notify_all()

    # The module

    @property
    def version(self) -> int:
        """Number of the version in use; 0 before the first ``update``."""
        found = self._following.current
        return 0 if found is None else found.number

    @property
    def ready(self) -> int:
        """Number of the version that the next ``update`` takes over; 0 if there is none."""
        found = self._following.ready
        return 0 if found is None else found.number

    def update(self, timeout: float = 0.0) -> int:
        """Puts the newest version that has arrived into the module; returns its number.

        Call it between two batches. Swaps pointers, or copies; blocks for nothing else, unless
        a version is to be waited for: see ``timeout``. If the publisher is lost, the version in use
        stays.

        Args:
            timeout: Seconds to wait for a version, if none has arrived since the last ``update``.

        Raises:
            CallTimeout: None arrived within a ``timeout`` above 0.
            WorkerLost: The publisher is lost, with a ``timeout`` above 0.
            ConfigurationError: This subscriber is closed, with a ``timeout`` above 0.
            WeightsMismatch: Tensors that are one here have different values in the version, or the
                module has other tensors than before; the version in use stays.
            WeftError: A fetch failed for another reason; the version in use stays, and the next one
                is fetched again.
        """
        if not isinstance(timeout, (int, float)):
            raise wrong_type("timeout", timeout, "pass a number of seconds, 0 for no wait")
        with self._updating:
            if timeout > 0 and self._ready is None:
                self._wait(timeout)
            began_s = time.perf_counter()
            # Not under the lock: the module may have hooks.
            targets = None if self._ready is None else self._targets()
            with self._changed:
                error, self._error = self._error, None
                if error is not None:
                    self._go_on(self._following.is_fetch_due)
                    raise error
                ready = self._ready
                if ready is None or targets is None:
                    return self.version
                self._check(self._layout, targets)
                switch = prepare(targets, ready.values, in_place=self._in_place)
                # Under the lock, so that the version that is put in is the one that is named.
                self._ready = None
                interrupt = switch.run()
                is_used = bool(switch.swaps) or (self._keeps_memory and not ready.is_shared)
                self._memory = ready.memory if is_used else None
                self._go_on(self._following.took())
                elapsed_s = time.perf_counter() - began_s
                counts = self._counts
                counts.versions += 1
                counts.longest_update_s = max(elapsed_s, counts.longest_update_s)
                if interrupt is not None:
                    raise interrupt
                return self.version

    def _wait(self, timeout_s: float) -> None:
        def is_over() -> bool:
            return bool(self._ready or self._error or self.lost or self._is_closed)

        with self._changed:
            if not self._changed.wait_for(is_over, timeout_s):
                publisher = self._publisher
                worker = self._worker if publisher is None else publisher.owner_name()
                raise CallTimeout(
                    f"no version after {self.version} arrived from worker {worker!r} within "
                    f"{timeout_s:g} s; call publish() on the publisher, or wait longer",
                    worker=worker,
                    call="publish",
                    elapsed_s=timeout_s,
                )
            if self._ready is None and self.lost is not None:
                raise self.lost
            self._check_open()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigurationError("this subscriber is closed: no version will arrive any more")

    def statistics(self) -> Taken:
        """Returns the counts so far."""
        with self._changed:
            return replace(self._counts)

    def close(self) -> None:
        """Stops following; the module keeps its version. A fetch that is under way is dropped."""
        with self._changed:
            self._is_closed = True
            fetch = self._abandon_fetch()
            if self._finalize is not None:
                self._finalize()
            self._publisher = None
            self._changed.notify_all()
            self._ready = self._memory = None
        if fetch is not None and fetch is not threading.current_thread():
            fetch.join()


def _check_publisher(publisher: object) -> None:
    if not isinstance(publisher, (RRef, Publisher)):
        raise wrong_type("publisher", publisher, "pass a Publisher, or a reference to one")


class _Fetch(threading.Thread):
    """Fetches one version. Holds no subscriber while it waits, so that a dropped one ends.

    Args:
        subscriber: Has begun this fetch.
        publisher: The publisher.
        name: Name of the thread.

    Attributes:
        call: The call of the publisher, once it was made.
    """

    def __init__(self, subscriber: Subscriber, publisher: RRef[Publisher], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.call: Future[Sent | None] | None = None
        self._of = weakref.ref(subscriber)
        self._publisher = publisher

    def run(self) -> None:
        """Asks, waits, and hands the answer or the error to the subscriber."""
        subscriber = self._of()
        if subscriber is None:
            return
        try:
            call = subscriber.ask(self, self._publisher)
            if call is None:
                return
            subscriber = None
            sent = call.wait()
            subscriber = self._of()
            if subscriber is not None:
                subscriber.arrived(self, sent)
        except Exception as error:
            subscriber = self._of()
            if subscriber is not None:
                subscriber.failed(self, error)


def _tell_loss(of: weakref.ref[Subscriber], publisher: str, error: WorkerLost) -> None:
    subscriber = of()
    if subscriber is not None and error.worker == publisher:
        subscriber._publisher_lost(error)


def _end(forget: Callable[[], None], publisher: RRef[Publisher], inbox: RRef[Inbox]) -> None:
    """Ends a subscription, on another thread: a finalizer may run anywhere."""

    def end() -> None:
        forget()
        try:
            ignore_errors(publisher.rpc_async().unsubscribe(inbox))
        except Exception:
            pass  # The publisher is lost, or this worker has left.

    with contextlib.suppress(NotInitialized):
        run_in_background(end)
