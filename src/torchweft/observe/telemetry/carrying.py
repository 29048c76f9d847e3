"""Contexts of spans as messages carry them: as text, and which passes have told it to whom.

The text is made and read by the propagator of the process: ``traceparent`` and ``baggage`` of the
W3C unless the program has set another.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict

from opentelemetry import context as contexts
from opentelemetry import propagate
from opentelemetry.context import Context

from torchweft.autograd.codec import PassName
from torchweft.ids import worker_of
from torchweft.wire.frames import Buffer
from torchweft.wire.messages import MAX_SPAN_BYTES, pass_span
from torchweft.worker.peers import Peer

MOST_CONTEXTS = 1000
"""Contexts of each kind that a worker keeps."""


def carried_in(context: Context) -> bytes:
    """Returns a context as a call carries it; nothing where it has none, or is too long."""
    headers: dict[str, str] = {}
    propagate.inject(headers, context)
    carried = "\n".join([f"{name}:{value}" for name, value in headers.items()]).encode()
    return carried if len(carried) <= MAX_SPAN_BYTES else b""


def context_in(carried: bytes) -> Context:
    """Returns the context that a message carries."""
    lines = carried.decode(errors="replace").split("\n")
    headers = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return propagate.extract(headers, Context())


class _Pass:
    """The span of a backward pass, as this worker knows it.

    Args:
        carried: Its context, as messages carry it.
    """

    def __init__(self, carried: bytes) -> None:
        self.carried = carried
        self.told: set[int] = set()
        """The workers to which this one has sent the context."""

    @functools.cached_property
    def context(self) -> Context:
        """Its context."""
        return context_in(self.carried)


class Passes:
    """The spans of the newest backward passes. Thread-safe.

    Attributes:
        me: The id of this worker.
    """

    def __init__(self) -> None:
        self.me = -1
        self._known: OrderedDict[tuple[int, int], _Pass] = OrderedDict()
        self._lock = threading.Lock()

    def take_span(self, key: tuple[int, int], carried: bytes) -> None:
        """Takes the context of the span of a pass, which another worker has sent.

        Args:
            key: The numbers of the pass and of its autograd context.
            carried: The context of the span.
        """
        self._take(key, carried)

    def _take(self, key: tuple[int, int], carried: bytes) -> _Pass:
        with self._lock:
            known = self._known.setdefault(key, _Pass(carried))
            if len(self._known) > MOST_CONTEXTS:
                self._known.popitem(last=False)
            return known

    def context_of(self, key: tuple[int, int]) -> Context | None:
        """Returns the context of a pass that another worker leads, if it has one."""
        found = self._known.get(key)
        return None if found is None else found.context

    def messages_before(self, peer: Peer, name: PassName) -> list[Buffer]:
        """Returns the context of a pass as a message, before the first message to a worker."""
        pass_id, key = name.pass_id, (name.pass_id, name.context_id)
        known = self._known.get(key)
        if known is None and worker_of(pass_id) != self.me:
            return []
        if known is None:  # The thread that leads a pass is the one that sends.
            known = self._take(key, carried_in(contexts.get_current()))
        if not known.carried or peer.id in known.told or peer.id == worker_of(pass_id):
            return []
        known.told.add(peer.id)
        return pass_span(*key, known.carried)
