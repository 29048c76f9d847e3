"""The plan of one map: its parts, the values that they share, and the workers that may run them.

A value is shared if several parts hold the same object, not an equal object. The search goes from
the outside in, so a list that all parts were given is one value, whatever it contains. Numbers,
strings and functions with a name are not worth sharing.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Container, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft import extending, knobs
from torchweft.autograd import current_context_id
from torchweft.errors import AutogradError, SerializationError, WorkerLost
from torchweft.extending import Member, Packed
from torchweft.mapreduce import trees
from torchweft.mapreduce.buffers import Buffers
from torchweft.mapreduce.partitioners import Cut, Error, with_note
from torchweft.mapreduce.shared import Slot
from torchweft.rpc import RRef, functions

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


class Plan:
    """All properties of a map before it runs.

    Args:
        function: The function to call for each part.
        cut: The parts that the partitioner made, and the workers that may run them.
        manner: How to run the map.

    Attributes:
        name: The function's name, for messages.
        function: The function to call for each part, with the care for buffers.
        parts: The parts.
        arguments: Args and kwargs of each part, without the values in ``content``.
        workers: Ranks of the workers that may run parts.
        members: The workers, by rank. In an open group a rank may belong to another one later.
        manner: How to run the map.
        may_rerun: Whether parts run again if a worker is lost.
        buffers: The buffers of modules that the first part gets.
        content: The function and the values that parts share, packed; None to send them with each
            part.
        own_content: The same for this worker, which needs it to have copies of its own.
        fan_out: How many workers get the content from one worker.
        is_async: Whether the function may return before its work is done.
        context_id: The autograd context that records the map; 0 if none does.
    """

    def __init__(self, function: Callable[..., Any], cut: Cut, manner: Manner) -> None:
        self.name = extending.function_name(function)
        self.parts = cut.parts
        self.workers = cut.workers
        homes = {part[0] for part in cut.parts}
        self.members = {rank: extending.find_worker(rank) for rank in (*cut.workers, *homes)}
        self.manner = manner
        self.may_rerun = cut.is_any if manner.rerun is None else manner.rerun
        self.fan_out = max(knobs.FAN_OUT.get(), 1)
        is_marked = functions.is_async_execution(function)
        self.is_async = is_marked or inspect.iscoroutinefunction(function)
        self.context_id = _recording_context()
        self.arguments = [(part[1], part[2]) for part in cut.parts]
        self.buffers = Buffers(function, *(self.arguments[0] if self.arguments else ((), {})))
        if self.buffers.are_any:
            function = self.buffers.watched(function)
            args, kwargs = self.arguments[0]
            self.arguments[0] = (args, self.buffers.wanted_with(kwargs))
        self.function = function
        self.content: Packed | None = None
        are_in_turn = len(cut.parts) > len(homes)
        if are_in_turn or len(homes) > self.fan_out:
            self._share(are_in_turn)
        self.own_content = self.content
        me = extending.this_worker()
        if self.content is None and me in self.members.values():
            packed = Packed.of((function, []), [me])
            self.own_content = None if packed.externals else packed

    def _share(self, are_in_turn: bool) -> None:
        """Takes the values that parts share out of their arguments, and packs them.

        Args:
            are_in_turn: Whether some workers run several parts, and can keep a part sent ahead.
        """
        common = find_common(self.arguments)
        if is_named(self.function) and not common.values and not are_in_turn:
            return
        members = self.members.values()
        try:
            packed = Packed.of((self.function, common.values), members)
            if packed.externals:
                # Each reference is counted when it is sent, so it is sent with each part.
                holders = {id(each) for each in common.values if Packed.of(each, members).externals}
                common = find_common(self.arguments, holders)
                packed = Packed.of((self.function, common.values), members)
        except SerializationError:
            return  # The call of a part raises a better error.
        if not packed.externals:
            self.arguments, self.content = common.arguments, packed

    @property
    def limit_s(self) -> float:
        """Time limit of the map in seconds."""
        return self.manner.timeout if self.manner.timeout > 0 else math.inf

    def content_for(self, member: Member) -> Packed | None:
        """Returns the content of a worker's ``Shared`` object; None if its parts need no object."""
        return self.own_content if member.is_self else self.content

    def keeps_ahead(self, member: Member) -> bool:
        """Whether a worker can be sent a part ahead: it needs a ``Shared`` object to keep the part.

        The object would take an ``async`` function for ended when it has only begun.
        """
        return self.content_for(member) is not None and not self.is_async

    def with_note(self, error: Error, part: int, worker: str) -> Error:
        """Returns an error of a part with a note that names the part."""
        text = f"in part {part} of {len(self.parts)} of a map of {self.name}, on worker {worker!r}"
        if str(error).startswith(_FOR_LEAVES):
            text += f"; {_LEAVES_OF_ITS_OWN}"
        return with_note(error, text)

    def lost_error(self, member: Member) -> WorkerLost:
        """Returns the error of a map that cannot continue without a worker."""
        text = f"in a map of {self.name} over {len(self.parts)} parts: "
        if self.may_rerun:
            text += "no worker is left to run the parts of the lost one"
        else:
            text += "parts of the lost worker are not run elsewhere; rerun=True allows that"
        return with_note(member.lost_error(), text)


def _recording_context() -> int:
    """Returns the autograd context that records calls of this thread; 0 if none does."""
    if not torch.is_grad_enabled():
        return 0
    try:
        return current_context_id()
    except AutogradError:
        return 0


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
        return is_named(leaf)
    return isinstance(leaf, _ATOMS)


def is_named(function: Callable[..., Any]) -> bool:
    """Whether a function travels by its name, as its module has it; else it is sent itself."""
    module = getattr(function, "__module__", None)  # Functions of torch written in C have none.
    found: Any = torch if module is None else sys.modules.get(module)
    path: str = getattr(function, "__name__" if module is None else "__qualname__", "")
    for name in path.split("."):
        found = getattr(found, name, None)
    return found is function
