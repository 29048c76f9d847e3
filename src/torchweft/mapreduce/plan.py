"""The plan of one map: its parts, the values that they share, and the workers that may run them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torchweft import knobs
from torchweft.agent.peers import Peer
from torchweft.errors import SerializationError, WorkerLost
from torchweft.mapreduce.notes import Error, with_note
from torchweft.mapreduce.parts import Cut, Part
from torchweft.mapreduce.sharing import Arguments, Common, find_common
from torchweft.rpc.functions import is_async_execution
from torchweft.rpc.worker import Worker
from torchweft.serialize.functions import describe, name_of
from torchweft.serialize.objects import Packed

UNWRAPPED = "__parallelize"
"""The start of the suffix that ``parallelize`` gives to the name of the original function."""


class Manner(NamedTuple):
    """How to run a map.

    Attributes:
        timeout: Seconds for the whole map; 0 for no limit, negative for the default of each call.
        balance: Whether idle workers take parts from other workers.
        rerun: Whether parts of a lost worker run on other workers; None if the partitioner
            decides.
        concurrency: How many parts a worker runs at a time.
    """

    timeout: float
    balance: bool
    rerun: bool | None
    concurrency: int


class Plan(NamedTuple):
    """All properties of a map before it runs.

    Attributes:
        name: The function's name, for messages.
        function: The function to call for each part.
        parts: The parts that the partitioner made.
        arguments: Args and kwargs of each part, without the values in ``content``.
        workers: Ranks of the workers that may run parts.
        content: The function and the values that parts share, packed; None to send them with each
            part.
        own_content: The same for this worker, which needs it to have copies of its own.
        may_rerun: Whether parts run again if a worker is lost.
        timeout: As in ``Manner``.
        balance: As in ``Manner``.
        concurrency: As in ``Manner``.
        fan_out: How many workers get the content from one worker.
        is_async: Whether the function may return before its work is done.
    """

    name: str
    function: Callable[..., Any]
    parts: Sequence[Part]
    arguments: Sequence[Arguments]
    workers: tuple[int, ...]
    content: Packed | None
    own_content: Packed | None
    may_rerun: bool
    timeout: float
    balance: bool
    concurrency: int
    fan_out: int
    is_async: bool = False

    @property
    def limit_s(self) -> float:
        """Time limit of the map in seconds."""
        return self.timeout if self.timeout > 0 else math.inf

    def content_for(self, peer: Peer) -> Packed | None:
        """Returns the content of a worker's ``Shared`` object; None if its parts need no object."""
        return self.own_content if peer.is_self else self.content

    def keeps_ahead(self, peer: Peer) -> bool:
        """Whether a worker can be sent a part ahead: it needs a ``Shared`` object to keep the part.

        The object would take an ``async`` function for ended when it has only begun.
        """
        return self.content_for(peer) is not None and not self.is_async

    def with_note(self, error: Error, part: int, worker: str) -> Error:
        """Returns an error of a part with a note that names the part."""
        return with_note(
            error,
            f"in part {part} of {len(self.parts)} of a map of {self.name}, on worker {worker!r}",
        )

    def lost_error(self, peer: Peer) -> WorkerLost:
        """Returns the error of a map that cannot continue without a worker."""
        text = f"in a map of {self.name} over {len(self.parts)} parts: "
        if self.may_rerun:
            text += "no worker is left to run the parts of the lost one"
        else:
            text += "parts of the lost worker are not run elsewhere; rerun=True allows that"
        return with_note(peer.lost_error(), text)


def make_plan(
    worker: Worker, function: Callable[..., Any], cut: Cut, manner: Manner, peers: Sequence[Peer]
) -> Plan:
    """Returns the plan of a map, with the values that its parts share packed once."""
    me = worker.agent.me
    fan_out = max(knobs.FAN_OUT.get(), 1)
    whole = [(part[1], part[2]) for part in cut.parts]
    common, content, own_content = Common([], whole), None, None
    homes = len({part[0] for part in cut.parts})
    are_in_turn = len(cut.parts) > homes
    if are_in_turn or homes > fan_out:
        common, content = _shared(worker, function, whole, peers, are_in_turn)
    if content is not None:
        own_content = content
    elif me in peers:
        own_content = worker.pack_for([me], (function, []))
        if own_content.externals:
            own_content = None
    return Plan(
        describe(function).partition(UNWRAPPED)[0],
        function,
        cut.parts,
        common.arguments,
        cut.workers,
        content,
        own_content,
        cut.is_any if manner.rerun is None else manner.rerun,
        manner.timeout,
        manner.balance,
        manner.concurrency,
        fan_out,
        is_async_execution(function) or inspect.iscoroutinefunction(function),
    )


def _shared(
    worker: Worker,
    function: Callable[..., Any],
    arguments: Sequence[Arguments],
    peers: Sequence[Peer],
    are_in_turn: bool,
) -> tuple[Common, Packed | None]:
    """Returns the rest of the arguments of all parts, and the values that they share, packed.

    Args:
        worker: This worker.
        function: The function to call for each part.
        arguments: Args and kwargs of each part.
        peers: The workers that may run parts.
        are_in_turn: Whether some workers run several parts, and can keep a part sent ahead.
    """
    common = find_common(arguments)
    nothing = Common([], list(arguments))
    is_named = name_of(function, main_by_name=True) is not None
    if is_named and not common.values and not are_in_turn:
        return nothing, None
    try:
        packed = worker.pack_for(peers, (function, common.values))
        if packed.externals:
            # Each reference is counted when it is sent, so it is sent with each part.
            holders = {id(each) for each in common.values if worker.pack_for(peers, each).externals}
            common = find_common(arguments, holders)
            packed = worker.pack_for(peers, (function, common.values))
    except SerializationError:
        return nothing, None  # The call of a part raises a better error.
    return (nothing, None) if packed.externals else (common, packed)
