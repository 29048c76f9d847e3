"""Publishes the weights of a module as numbered versions."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
import weakref
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from torchweft import memory
from torchweft.arguments import wrong_type
from torchweft.errors import (
    ArgumentTypeError,
    CallTimeout,
    ConfigurationError,
    NotInitialized,
    SerializationError,
)
from torchweft.extending import (
    Member,
    caller,
    check_caller,
    check_types,
    rebuilds_plain,
    run_in_background,
    this_worker,
)
from torchweft.rpc import Future, RRef, detached, expose, rpc_async
from torchweft.weights import delta
from torchweft.weights.layout import Layout, Source, check_same, check_shared, layout_of, tensors_of
from torchweft.weights.versions import Offer, Offers, Version

_log = logging.getLogger("torchweft")
_ANNOUNCE_S = 60.0
"""The time limit of an announcement; a worker that is silent for so long is lost in most groups."""
_WORTH = 0.5
"""The largest share of the whole weights that a delta may have."""


# The memory of versions. Memory that was never written has no pages yet. To find and clear them
# takes several times as long as the copy of the weights into it. So the memory of the next version
# is made before it is needed.


class Memory(NamedTuple):
    """The memory of a version.

    Attributes:
        tensor: Bytes, of shape ``(size_bytes,)``.
        is_shared: Whether the workers of this host can map it.
    """

    tensor: Tensor
    is_shared: bool


class Storage:
    """Makes the memory of versions of one size. Thread-safe.

    Args:
        worker: This worker.
        size_bytes: Bytes of a version.
        is_pinned: Whether to page-lock the memory where that is possible, for copies from GPUs.
    """

    def __init__(self, worker: Member, size_bytes: int, *, is_pinned: bool = False) -> None:
        self._worker = worker
        self._size_bytes = size_bytes
        self._is_pinned = is_pinned
        self._preparing = threading.Lock()
        self._spare: Memory | None = None
        self._has_warned = False

    @property
    def prepared(self) -> Memory | None:
        """The memory of the next version, if it is ready."""
        return self._spare

    def prepare_soon(self) -> None:
        """Has a thread of the worker make the memory of the next version; does not block."""
        run_in_background(self._prepare)

    def _prepare(self) -> None:
        with self._preparing:
            if self._spare is None:
                # Where there is none now, there may be some when it is needed.
                with contextlib.suppress(MemoryError, NotInitialized):
                    self._spare = self._shared()

    def take(self, worker: Member) -> Memory:
        """Returns memory for a version; waits if it is being made.

        Args:
            worker: This worker now; the process may have joined another group.
        """
        with self._preparing:
            if worker is not self._worker:
                self._worker, self._spare = worker, None
            spare, self._spare = self._spare, None
        if spare is not None:
            return spare
        try:
            return self._shared()
        except MemoryError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("weights are sent as copies, also on this host: %s", error)
            return Memory(memory.pooled_empty(self._size_bytes, dtype=torch.uint8), False)

    def _shared(self) -> Memory:
        if self._is_pinned:
            # Without the lock, copies take longer.
            with contextlib.suppress(MemoryError):
                made = memory.shared_empty(self._size_bytes, dtype=torch.uint8, pin_memory=True)
                return Memory(made, True)
        return Memory(memory.shared_empty(self._size_bytes, dtype=torch.uint8), True)


# Messages to subscribers


@rebuilds_plain
@dataclass
class Published:
    """Counts of one publisher.

    Attributes:
        versions: Versions that were published.
        shared: Answers for which no byte was copied: the subscriber maps the version.
        wholes: Whole copies that were sent.
        deltas: Deltas that were sent.
        whole_bytes: Bytes of the whole copies.
        delta_bytes: Bytes of the deltas.
        longest_publish_s: Seconds of the longest ``publish``.
    """

    versions: int = 0
    shared: int = 0
    wholes: int = 0
    deltas: int = 0
    whole_bytes: int = 0
    delta_bytes: int = 0
    longest_publish_s: float = 0.0


@rebuilds_plain
class Terms(NamedTuple):
    """The answer to a subscription.

    Attributes:
        layout: The published tensors.
        publisher: Number of this life of the publisher.
        has_deltas: Whether deltas may be sent.
        newest: The newest version; None before the first.
    """

    layout: Layout
    publisher: int
    has_deltas: bool
    newest: Version | None


@rebuilds_plain
class Sent(NamedTuple):
    """The answer to a fetch.

    Attributes:
        offer: The version, and its base.
        is_shared: Whether the memory is that of the publisher.
        data: The whole version, or the code of a delta, as bytes of shape ``(n,)``.
        checksum: That of a delta.
    """

    offer: Offer
    is_shared: bool
    data: Tensor
    checksum: int = 0


class Inbox:
    """Where announcements reach a subscriber; a publisher has a reference to it.

    Args:
        subscriber: The ``Subscriber``, which the publisher does not keep alive.
    """

    def __init__(self, subscriber: Any) -> None:
        self.subscriber = weakref.ref(subscriber)


def announce(inbox: RRef[Inbox], version: Version) -> bool:
    """Tells a subscriber of this worker of a version of the caller.

    Returns:
        Whether it follows the caller. A publisher that it follows no more has not been told yet:
        that is no error.
    """
    check_types(inbox=(inbox, RRef), version=(version, Version))
    held = inbox.local_value()
    if not isinstance(held, Inbox):
        raise ArgumentTypeError(f"a version was announced to a {type(held).__name__}")
    subscriber = held.subscriber()
    if subscriber is None or not subscriber.follows(caller().id):
        return False
    subscriber.announced(version)
    return True


class _Subscription:
    """A subscriber, and the last version of which it was told."""

    def __init__(self, inbox: RRef[Inbox], told: int) -> None:
        self.inbox = inbox
        self.told = told
        self.is_being_told = False


class Publisher:
    """Publishes the weights of a module, or any tensors by name, as numbered versions.

    Other workers follow it with a ``Subscriber``, to which a reference is passed,
    ``rpc.RRef(publisher)``. A version lies in memory that the workers of this host share, so no
    bytes are copied for a subscriber on this host. To a subscriber on another host a version is
    sent once it has taken over the former, whole or as a delta; if it is slow, it skips versions.
    Nothing waits for a subscriber, and a lost one is forgotten. Thread-safe.

    The publisher keeps the newest version, memory for the next one, and with ``deltas`` so many
    older ones. Fresh memory takes much longer to write than memory that was in use, so a thread of
    the worker prepares it while the program computes. Subscribers on this host keep at most two
    versions each in this worker's shared memory, whose bound is ``WEFT_SHM_LIMIT_BYTES``; beyond
    it, versions lie in private memory and are sent as copies.

    Args:
        source: The module, of which parameters and persistent buffers are published, or a dict of
            tensors. Any device and strides.
        dtype: The type in which floating-point tensors are published, such as ``torch.bfloat16``;
            None for their own.
        deltas: How many older versions are kept. A subscriber on another host that has one of them
            gets the words that have changed, if they take less than half of the bytes.
        after: The first version has the number after this; for a trainer that was restarted.

    Raises:
        ArgumentTypeError: The source has other values than dense tensors.
        ConfigurationError: An argument is out of range.
        NotInitialized: This process is not a worker.
    """

    def __init__(
        self,
        source: Source,
        *,
        dtype: torch.dtype | None = None,
        deltas: int = 0,
        after: int = 0,
    ) -> None:
        for name, value in (("deltas", deltas), ("after", after)):
            if type(value) is not int or value < 0:
                raise ConfigurationError(f"{name}={value!r}: pass a number, at least 0")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise wrong_type("dtype", dtype, "pass one such as torch.bfloat16")
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigurationError(f"dtype={dtype}: pass a floating-point type")
        worker = this_worker()
        self._worker = worker.name
        self._source = source
        self._dtype = dtype
        tensors = tensors_of(source)
        self._layout = layout_of(tensors, dtype)
        self._has_deltas = deltas > 0
        self._life = secrets.randbits(63)
        self._offers = Offers(self._life, after, deltas)
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._encoding = threading.Lock()
        is_on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        self._storage = Storage(worker, self._layout.size_bytes, is_pinned=is_on_gpu)
        self._kept: dict[int, Memory] = {}
        self._deltas: dict[tuple[int, int], delta.Delta | None] = {}
        self._subscriptions: dict[object, _Subscription] = {}
        self._counts = Published()
        self._storage.prepare_soon()

    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            "a Publisher belongs to its process, and cannot be copied or sent; send "
            "rpc.RRef(publisher), which a Subscriber takes"
        )

    @property
    def version(self) -> int:
        """Number of the newest version; that of ``after`` before the first."""
        return self._offers.number

    def publish(self) -> int:
        """Makes the present values a version, and tells the subscribers. Returns its number.

        Blocks for the copy into the version's memory, and a small message to each subscriber; waits
        for none of them. The values must not be changed meanwhile, by other threads.

        Raises:
            WeightsMismatch: The source has other tensors than at first; nothing is published.
            NotInitialized: This process is no worker any more.
        """
        began_s = time.perf_counter()
        with self._publishing:
            tensors = tensors_of(self._source)
            subject = f"the source on {self._worker!r}"
            check_same(self._layout, tensors, self._dtype, subject)
            check_shared(self._layout, tensors, subject)
            kept = self._storage.take(this_worker())
            fill(self._layout, tensors, kept.tensor)
            with self._lock:
                version = self._offers.published()
                self._kept[version.number] = kept
                self._kept = {number: self._kept[number] for number in self._offers.kept}
                subscriptions = list(self._subscriptions.values())
                self._deltas.clear()
        for each in subscriptions:
            self._tell(each)
        self._storage.prepare_soon()
        elapsed_s = time.perf_counter() - began_s
        with self._lock:
            counts = self._counts
            counts.versions += 1
            counts.longest_publish_s = max(elapsed_s, counts.longest_publish_s)
        return version.number

    def statistics(self) -> Published:
        """Returns the counts so far."""
        with self._lock:
            return replace(self._counts)

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of the newest version, for a snapshot beside that of the source."""
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state of a snapshot: the next version has the number after that one."""
        with self._lock:
            self._offers.number = max(self._offers.number, int(state["version"]))

    # Announcements

    def _tell(self, subscription: _Subscription) -> None:
        """Announces the newest version, unless an announcement is under way: its end does."""
        with self._lock:
            newest = self._offers.newest
            if newest is None or subscription.is_being_told or subscription.told == newest.number:
                return
            subscription.is_being_told = True
            subscription.told = newest.number

        def told(done: Any) -> None:
            with self._lock:
                subscription.is_being_told = False
            try:
                is_there = done.wait()
            except CallTimeout:
                is_there = True
                subscription.told = 0  # A call that was not begun in time never is.
            except Exception:
                is_there = False
            if is_there:
                self._tell(subscription)
            else:
                self._forget(subscription.inbox)

        try:
            with detached():
                inbox = subscription.inbox
                future: Future[bool] = rpc_async(
                    inbox.owner(), announce, (inbox, newest), timeout=_ANNOUNCE_S
                )
        except Exception:  # It is lost, or this worker leaves.
            self._forget(subscription.inbox)
            return
        future.add_done_callback(told)

    def _forget(self, inbox: RRef[Inbox]) -> None:
        with self._lock:
            self._subscriptions.pop(inbox.id, None)

    # Called by subscribers: each speaks for its own worker

    @expose
    def get_version(self) -> int:
        """Returns the number of the newest version; for other workers."""
        return self.version

    @expose
    def subscribe(self, inbox: RRef[Inbox]) -> Terms:
        """Adds a subscriber of the caller."""
        _check_own(inbox)
        with self._lock:
            newest = self._offers.newest
            told = 0 if newest is None else newest.number
            self._subscriptions[inbox.id] = _Subscription(inbox, told)
        return Terms(self._layout, self._life, self._has_deltas, newest)

    @expose
    def unsubscribe(self, inbox: RRef[Inbox]) -> None:
        """Removes a subscriber of the caller; does nothing if there is no such."""
        _check_own(inbox)
        self._forget(inbox)

    @expose
    def fetch(self, have: Version | None) -> Sent | None:
        """Returns the newest version for the caller; None if there is none but the one it has."""
        check_types(have=(have, (Version, type(None))))
        lends = memory.is_shared_with(caller().info)
        with self._lock:
            newest = self._offers.newest
            is_shared = newest is not None and lends and self._kept[newest.number].is_shared
            offer = self._offers.fetched(have, is_shared=is_shared)
            if offer is None:
                return None
            new = self._kept[offer.version.number].tensor
            base = None if offer.base is None else self._kept[offer.base.number].tensor
        if base is not None:
            found = self._delta(offer, base, new)
            if found is not None:
                code = torch.frombuffer(bytearray(found.code), dtype=torch.uint8)
                with self._lock:
                    self._counts.deltas += 1
                    self._counts.delta_bytes += len(found.code)
                return Sent(offer, False, code, found.checksum)
        with self._lock:
            if is_shared:
                self._counts.shared += 1
            else:
                self._counts.wholes += 1
                self._counts.whole_bytes += self._layout.size_bytes
        return Sent(offer._replace(base=None), is_shared, new)

    def _delta(self, offer: Offer, base: Tensor, new: Tensor) -> delta.Delta | None:
        """Returns the delta, which several subscribers may need; one thread at a time makes it."""
        assert offer.base is not None
        key = offer.base.number, offer.version.number
        with self._encoding:
            with self._lock:
                if key in self._deltas:
                    return self._deltas[key]
            limit_bytes = int(_WORTH * self._layout.size_bytes)
            found = delta.encode(words_of(base), words_of(new), limit_bytes)
            with self._lock:
                if offer.version == self._offers.newest:  # Else nobody will ask for it again.
                    self._deltas[key] = found
            return found


def _check_own(inbox: Any) -> None:
    check_types(inbox=(inbox, RRef))
    check_caller((inbox.owner_name(),), "change a subscription of another worker")


def fill(layout: Layout, tensors: dict[str, Tensor], version: Tensor) -> None:
    """Copies tensors into the memory of a version; blocks until all copies are complete.

    Args:
        layout: The places of the tensors.
        tensors: The tensors by name. Copies from GPUs follow the work of their current streams.
        version: The memory, of shape ``(size_bytes,)`` and type uint8.
    """
    devices: set[torch.device] = set()
    with torch.no_grad():
        for name, view in layout.views(version).items():
            tensor = tensors[name]
            view.copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
        for gap in layout.gaps():
            version[gap] = 0
    for device in devices:
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        end.record(torch.cuda.current_stream(device))
        end.synchronize()


def words_of(version: Tensor) -> delta.Words:
    """Returns the words of a version, in its memory."""
    found: delta.Words = version.numpy().view("<u2")
    return found
