"""What the rows of one worker say, as slices: something of a thread, with a begin and an end.

Each worker reads its own rows when the trace has ended, and the leader puts the slices of all
together. A slice at an end of an arrow has a text that names the arrow. No id is added to a message
for that. The caller and the number that a ``CALL`` and its ``REPLY`` carry are unique, as are the
owner, creator and number of a value that is made, and the pass and the message of gradients. All
other messages of one kind and number between two workers have one name, and keep their order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchweft.extending import Message
from torchweft.observe.tracing.notes import (
    CREATED,
    MADE,
    OFFERED,
    PULLED,
    RAN,
    RECEIVED,
    SENT,
    SERVED,
    Row,
)
from torchweft.observe.tracing.reading import FETCH, RECEIVE, RUN, SEND

SERVICE = "torchweft.observe.tracing.recorder."
"""Begins the names of the functions by which workers are traced."""

_US = 1e6
_QUEUED_S = 20e-6
"""Shorter times in line are no slices, only arguments."""


class Slice(NamedTuple):
    """Something that takes time.

    Attributes:
        track: The number of its thread.
        began_s: When it began.
        ended_s: When it ended.
        category: Its category.
        name: Its name.
        args: What is known about it; plain values.
        arrow: Names the arrow that begins, goes through or ends here; empty for none.
        is_apart: Whether it does not nest in its thread, and is on a track of its own.
    """

    track: int
    began_s: float
    ended_s: float
    category: str
    name: str
    args: dict[str, Any]
    arrow: str = ""
    is_apart: bool = False


def _key(caller: int, callee: int, number: int, creation: int) -> str:
    """Returns the name of a call, which is the same at its caller and its callee."""
    return f"{caller}.{number}" if number else f"{caller}.{callee}.{creation}"


class Slicer:
    """Reads the rows of one worker.

    Args:
        rows: The rows.
        ends: The times at which messages and answers of rows were written.
        me: The id of the worker.
        name_of: Returns the name of a worker by the number of its life.
        own_calls: Callers and numbers of calls of the trace itself, which are left out.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        ends: Mapping[int, float],
        me: int,
        name_of: Callable[[int], str],
        own_calls: Iterable[tuple[int, int]],
    ) -> None:
        self._ends = ends
        self._me = me
        self._name = name_of
        self._rows: dict[int, list[Row]] = defaultdict(list)
        self._functions: dict[str, str] = {}
        self._contexts: dict[str, int] = {}
        self._begun: dict[str, float] = {}
        self._own = {_key(caller, 0, number, 0) for caller, number in own_calls}
        for number, tag, *fields in sorted(rows, key=lambda row: int(row[0])):
            self._rows[tag].append((number, *fields))
            self._note_call(tag, fields)
        self._messages = [*self._sent(), *self._received()]

    def slices(self) -> list[Slice]:
        """Returns all slices; those that overlap others of their thread are set apart."""
        parts = (self._messages, self._made(), self._created(), self._runs(), self._work())
        return set_apart([each for part in parts for each in part])

    def _note_call(self, tag: int, fields: Sequence[Any]) -> None:
        """Notes the function of a call, and whether it is one of the trace itself."""
        if tag == MADE:
            key, function = _key(self._me, 0, fields[4], 0), fields[5]
        elif tag == CREATED:
            key, function = _key(self._me, fields[2], 0, fields[3]), fields[4]
        elif tag == SERVED:
            key, function = _key(fields[5], self._me, *fields[6:8]), fields[8]
            self._contexts[key] = fields[9]
            self._begun.setdefault(key, fields[0])
        else:
            return
        self._functions[key] = function
        if function.startswith(SERVICE):
            self._own.add(key)

    # Messages

    def _sent(self) -> Iterator[Slice]:
        offered: dict[Any, deque[Any]] = defaultdict(deque)
        for _, *which, channels in self._rows[OFFERED]:
            offered[tuple(which)].append(channels)
        for row, began_s, thread, peer, *note in self._rows[SENT]:
            found = Message.noted(note)
            inside = {"inline": found.inline_bytes, "stream": found.stream_bytes}
            channels = {name: count for name, count in inside.items() if count}
            waiting = offered.get((peer, found.kind, found.number))
            if waiting:
                channels.update(waiting.popleft())
            times = began_s, max(self._ends.get(row, began_s), began_s)
            told = {"tensors": channels} if channels else {}
            yield from self._message(SEND, thread, times, peer, found, told)

    def _received(self) -> Iterator[Slice]:
        for _, at_s, thread, peer, *note in self._rows[RECEIVED]:
            found = Message.noted(note)
            yield from self._message(RECEIVE, thread, (at_s, at_s), peer, found, {})

    def _message(
        self,
        category: str,
        thread: int,
        times: tuple[float, float],
        peer: int,
        found: Message,
        told: dict[str, Any],
    ) -> Iterator[Slice]:
        """Yields the slice of a message, unless it belongs to a call of the trace itself."""
        sender, receiver = (self._me, peer) if category == SEND else (peer, self._me)
        what, number = found.kind, found.number
        key, arrow = "", f"{what} {sender}.{receiver}.{number}.{found.creation}"
        if what == "call":
            key = _key(sender, receiver, number, found.creation)
            self._contexts.setdefault(key, found.context_id)
            if category == SEND:
                self._begun[key] = times[0]
        elif what == "reply":
            key = _key(receiver, 0, number, 0)
        elif what == "gradients":
            arrow = f"{what} {sender}.{receiver}.{number}.{found.message_id}"
        if key in self._own:
            return
        function = self._functions.get(key, "")
        args: dict[str, Any] = {"kind": what, "bytes": found.size_bytes, **told}
        if function:
            args |= {"call": key, "function": function}
        elif number:
            args["number"] = number
        if found.context_id > 0:
            args["context"] = found.context_id
        args["to" if category == SEND else "from"] = self._name(peer)
        name = f"{category} {what} {function}".rstrip()
        yield Slice(thread, *times, category, name, args, f"{what} {key}" if key else arrow)

    # Calls

    def _about(self, key: str, function: str, **others: Any) -> dict[str, Any]:
        """Returns what is known of a call."""
        context_id = self._contexts.get(key, 0)
        context = {"context": context_id} if context_id > 0 else {}
        return {"call": key, "function": function, **context, **others}

    def _arrow_to(self, callee: int, key: str) -> str:
        """Returns the arrow that begins at a call itself: it has no message."""
        return f"call {key}" if callee == self._me else ""

    def _made(self) -> Iterator[Slice]:
        for row in self._rows[MADE]:
            _, began_s, ended_s, thread, callee, number, function, *parent, is_async, failed = row
            key = _key(self._me, 0, number, 0)
            if key in self._own:
                continue
            args = self._about(key, function, to=self._name(callee))
            if failed:
                args["failed"] = True
            if parent[0] >= 0 and parent[1]:
                args["parent"] = f"{parent[0]}.{parent[1]}"
            name, arrow = f"call {function}", self._arrow_to(callee, key)
            yield Slice(thread, began_s, ended_s, "call", name, args, arrow, is_async)

    def _created(self) -> Iterator[Slice]:
        for _, at_s, thread, owner, creation, function in self._rows[CREATED]:
            key = _key(self._me, owner, 0, creation)
            # A worker may serve its own call before the thread that has made it goes on.
            began_s = min(self._begun.get(key, at_s), at_s)
            args = self._about(key, function, to=self._name(owner))
            name, arrow = f"create {function}", self._arrow_to(owner, key)
            yield Slice(thread, began_s, at_s, "create", name, args, arrow)

    def _runs(self) -> Iterator[Slice]:
        for number, arrived_s, began_s, ended_s, *row in self._rows[SERVED]:
            thread, ended_in, caller, *which, name, _, failed = row
            answered_s = max(self._ends.get(number, ended_s), ended_s)
            key = _key(caller, self._me, *which)
            if key in self._own:
                continue
            queued_s = began_s - arrived_s
            args = self._about(key, name)
            told = args | {"from": self._name(caller), "queued_us": round(queued_s * _US, 1)}
            if failed:
                told["failed"] = True
            if queued_s > _QUEUED_S:
                title = f"queued {name}"
                yield Slice(thread, arrived_s, began_s, "queue", title, args, is_apart=True)
            moves = thread != ended_in
            yield Slice(thread, began_s, ended_s, RUN, name, told, f"call {key}", moves)
            title = f"answer {name}"
            yield Slice(ended_in, ended_s, answered_s, "answer", title, args)

    # Other work

    def _work(self) -> Iterator[Slice]:
        pulled: dict[int, list[Any]] = defaultdict(list)
        for _, at_s, thread, channel, size_bytes in self._rows[PULLED]:
            pulled[thread].append((at_s, channel, size_bytes))
        for _, began_s, ended_s, thread, *told in self._rows[RAN]:
            category, name, context_id, details = told
            args: dict[str, Any] = dict(details)
            if context_id:
                args["context"] = context_id
            for at_s, channel, size_bytes in pulled[thread] if category == FETCH else ():
                if began_s <= at_s <= ended_s:
                    tensors = args.setdefault("tensors", {})
                    tensors[channel] = tensors.get(channel, 0) + size_bytes
            yield Slice(thread, began_s, ended_s, category, f"{category} {name}", args)


def set_apart(slices: Iterable[Slice]) -> list[Slice]:
    """Sets slices apart that overlap others of their thread without being inside."""
    found: list[Slice] = []
    around: dict[int, list[Slice]] = defaultdict(list)
    for each in sorted(slices, key=lambda each: (each.began_s, -each.ended_s)):
        outer = around[each.track]
        while not each.is_apart and outer and outer[-1].ended_s <= each.began_s:
            outer.pop()
        if not each.is_apart and outer and each.ended_s > outer[-1].ended_s:
            if each.category == SEND:
                # The answer may be read before the thread that has sent the request goes on.
                each = each._replace(ended_s=outer[-1].ended_s)
            else:
                each = each._replace(is_apart=True)
        elif not each.is_apart:
            outer.append(each)
        found.append(each)
    return found
