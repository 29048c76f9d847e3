"""The plan of one map: its parts, the values that they share, and the workers that may run them.

A value is shared if several parts hold the same object, not an equal object. The search goes from
the outside in, so a list that all parts were given is one value, whatever it contains. Numbers,
strings and functions with a name are not worth sharing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Container, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft import knobs
from torchweft.engine.codec.functions import describe, name_of
from torchweft.engine.codec.objects import Packed
from torchweft.engine.worker.peers import Peer
from torchweft.errors import SerializationError, WorkerLost
from torchweft.mapreduce import trees
from torchweft.mapreduce.partitioners import Cut, Error, Part, with_note
from torchweft.mapreduce.shared import Buffers, Slot
from torchweft.rpc import RRef
from torchweft.rpc.serving import ASYNC_MARK
from torchweft.rpc.worker import Worker

_FOR_LEAVES = ("can't optimize a non-leaf Tensor", "Only Tensors created explicitly by the user")
"""The errors of torch where an optimizer, or a deep copy, is given a tensor that has a graph."""
_LEAVES_OF_ITS_OWN = (
    "within an autograd context the parameters that a part is given lead to those of the caller; "
    "for an optimizer of the part: model = torchweft.mapreduce.module_clone(model, by='deepcopy')"
)


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
        manner: How to run the map.
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
    manner: Manner
    fan_out: int
    is_async: bool = False

    @property
    def limit_s(self) -> float:
        """Time limit of the map in seconds."""
        return self.manner.timeout if self.manner.timeout > 0 else math.inf

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
        text = f"in part {part} of {len(self.parts)} of a map of {self.name}, on worker {worker!r}"
        if str(error).startswith(_FOR_LEAVES):
            text += f"; {_LEAVES_OF_ITS_OWN}"
        return with_note(error, text)

    def lost_error(self, peer: Peer) -> WorkerLost:
        """Returns the error of a map that cannot continue without a worker."""
        text = f"in a map of {self.name} over {len(self.parts)} parts: "
        if self.may_rerun:
            text += "no worker is left to run the parts of the lost one"
        else:
            text += "parts of the lost worker are not run elsewhere; rerun=True allows that"
        return with_note(peer.lost_error(), text)


def make_plan(
    worker: Worker,
    function: Callable[..., Any],
    cut: Cut,
    manner: Manner,
    peers: Sequence[Peer],
    buffers: Buffers,
) -> Plan:
    """Returns the plan of a map, with the values that its parts share packed once."""
    me = worker.agent.me
    fan_out = max(knobs.FAN_OUT.get(), 1)
    name = describe(function)
    is_async = hasattr(function, ASYNC_MARK) or inspect.iscoroutinefunction(function)
    whole = [(part[1], part[2]) for part in cut.parts]
    if buffers.are_any:
        function = buffers.watched(function)
        whole[0] = (whole[0][0], buffers.wanted_with(whole[0][1]))
    common, content, own_content = Common([], whole), None, None
    homes = len({part[0] for part in cut.parts})
    are_in_turn = len(cut.parts) > homes
    if are_in_turn or homes > fan_out:
        common, content = _shared(worker, function, whole, peers, are_in_turn)
    if content is not None:
        own_content = content
    elif me in peers:
        own_content = worker.encoder.pack_for([me], (function, []))
        if own_content.externals:
            own_content = None
    return Plan(
        name,
        function,
        cut.parts,
        common.arguments,
        cut.workers,
        content,
        own_content,
        cut.is_any if manner.rerun is None else manner.rerun,
        manner,
        fan_out,
        is_async,
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
        packed = worker.encoder.pack_for(peers, (function, common.values))
        if packed.externals:
            # Each reference is counted when it is sent, so it is sent with each part.
            holders = {
                id(each) for each in common.values if worker.encoder.pack_for(peers, each).externals
            }
            common = find_common(arguments, holders)
            packed = worker.encoder.pack_for(peers, (function, common.values))
    except SerializationError:
        return nothing, None  # The call of a part raises a better error.
    return (nothing, None) if packed.externals else (common, packed)


# Shared values

Arguments = tuple[Any, Any]
"""The args and kwargs of a part."""

LIGHT_BYTES = 1 << 16
"""Arguments with no more bytes of tensors than this count as fast to send."""

_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, type, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(RRef, Slot),
)
_FUNCTIONS = (FunctionType, BuiltinFunctionType)


class Common(NamedTuple):
    """The values that parts share, and the rest of their arguments.

    Attributes:
        values: The objects that several parts hold.
        arguments: Args and kwargs of each part, with a ``Slot`` in place of each shared object.
    """

    values: list[Any]
    arguments: list[Arguments]


def find_common(arguments: Sequence[Arguments], excluded: Container[int] = ()) -> Common:
    """Takes the objects that several parts hold out of the arguments of all parts.

    Args:
        arguments: Args and kwargs of each part.
        excluded: The ``id`` of each object that must stay in the arguments.
    """
    held: dict[int, tuple[Any, int]] = {}
    """By id, each object and the first part that holds it; a reference keeps the id in use."""
    common: dict[int, Slot] = {}
    values: list[Any] = []

    def is_common(part: int, node: Any) -> bool:
        key = id(node)
        if key in common:
            return True
        _, first = held.setdefault(key, (node, part))
        if first == part or key in excluded or not is_worth_it(node):
            return False
        common[key] = Slot(len(values))
        values.append(node)
        return True

    for part, each in enumerate(arguments):
        trees.flatten(each, partial(is_common, part))
    return Common(values, [_emptied(each, common) for each in arguments])


def _emptied(arguments: Arguments, common: dict[int, Slot]) -> Arguments:
    if not common:
        return arguments
    flat, spec = trees.flatten(arguments, lambda node: id(node) in common)
    args, kwargs = trees.unflatten([common.get(id(leaf), leaf) for leaf in flat], spec)
    return args, kwargs


def is_worth_it(tree: Any) -> bool:
    """Whether a tree contains a leaf that costs more to send than a number or a name."""
    return any(not _is_atom(leaf) for leaf in trees.leaves(tree))


def is_light(arguments: Arguments) -> bool:
    """Whether arguments are fast to send."""
    size = 0
    for leaf in trees.leaves(arguments):
        if isinstance(leaf, Tensor):
            size += leaf.nbytes
        elif not _is_atom(leaf):
            return False
    return size <= LIGHT_BYTES


def may_have_graph(result: Any) -> bool:
    """Whether gradients may lead into a result; True if that cannot be determined."""
    for leaf in trees.leaves(result):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                return True
        elif not _is_atom(leaf):
            return True
    return False


def _is_atom(leaf: Any) -> bool:
    if isinstance(leaf, _FUNCTIONS):
        return name_of(leaf, main_by_name=True) is not None
    return isinstance(leaf, _ATOMS)
