"""A member of the group against a strict worker, which runs nothing that is not registered.

Half of the inputs are made by a grammar (``tests.fuzz.strict.grammar``), and half are such messages
changed byte by byte. A whole worker runs in this process; see ``tests.fuzz.strict.world``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import random
import resource
import threading
import traceback
import warnings
from collections.abc import Iterator

from tests.fuzz.strict import watching
from tests.fuzz.strict.grammar import Grammar
from tests.fuzz.strict.world import World
from tests.fuzz.target import Target
from torchweft.engine.codec.values import NUMBER, TUPLE
from torchweft.engine.wire.frames import FrameParser
from torchweft.errors import ProtocolError, SerializationError

_LENGTH_LIMIT = 4096
_LIMIT_BYTES = 1 << 16
_MESSAGES_A_WORKER = 100
_GROWTH_BYTES = 512 << 20
_MAY_RAISE = (ProtocolError, SerializationError)
_ERROR_START = NUMBER.pack(TUPLE, 3)

warnings.simplefilter("ignore")


class _Victim:
    """The worker, replaced now and then, and when it has turned the sender away."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._left = 0
        self._first_bytes = 0

    def world(self) -> World:
        """Returns a worker that still talks to the sender."""
        self.begin()
        self._left -= 1
        assert self._world is not None
        return self._world

    def begin(self) -> None:
        """Makes a worker if the last one is used up."""
        if self._world is None or self._left < 1 or self._world.sender.lost is not None:
            self.end()
            self._world, self._left = World(), _MESSAGES_A_WORKER

    def end(self) -> None:
        """Ends the worker, and checks the threads and the memory that it leaves behind."""
        if self._world is not None:
            self._world.close()
            self._world = None
            gc.collect(1)
        assert threading.active_count() <= 2, threading.enumerate()
        used_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        self._first_bytes = self._first_bytes or used_bytes
        assert used_bytes <= self._first_bytes + _GROWTH_BYTES, f"{used_bytes} bytes are taken"


_victim = _Victim()


_IMPORTED_LATE = (
    "torch._dynamo",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
)
"""Modules that functions of torch import when they are first called, with any arguments."""


def _rehearse() -> None:
    """Imports and reads everything that honest calls, and errors, need."""
    for name in _IMPORTED_LATE:
        with contextlib.suppress(ImportError):  # Another version of torch has others.
            importlib.import_module(name)
    for number in range(300):
        data = Grammar(random.Random(number)).message()
        _serve(data, _victim.world(), _parser(data))
    watching.read_sources()


def _parser(data: bytes) -> FrameParser:
    """Returns the parser of a connection that is to bring a message."""
    return FrameParser(
        lambda size: memoryview(bytearray(size)), len(data) + 64, _LIMIT_BYTES, _LIMIT_BYTES
    )


def _serve(data: bytes, world: World, parser: FrameParser) -> Exception | None:
    refusal: Exception | None = None
    space = parser.space()[0]
    space[: len(data)] = data
    try:
        frames = parser.received(len(data))
    except ProtocolError as error:
        return error
    for frame in frames:
        if world.sender.lost is not None:
            break
        refusal = world.receive(frame) or refusal
    if data[:1] == b"\t":
        # Only the leader of a failed backward pass reads the error inside the message.
        _show(world.tell_error(data[data.find(_ERROR_START) :]))
    return refusal


def _show(error: BaseException) -> None:
    """Formats an error, as a log would."""
    traceback.format_exception(error)


def forget() -> None:
    """Ends the worker; the next message meets a new one."""
    _victim.end()


_is_ready = False


def begin() -> None:
    """Makes a worker; before the first one, prepares all that messages share."""
    global _is_ready
    if not _is_ready:
        with _silence():
            _rehearse()
        _is_ready = True
    _victim.begin()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    log = logging.getLogger("torchweft")
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False


def run(data: bytes) -> Exception | None:
    """Delivers one message to a worker, and asserts that the worker did nothing forbidden."""
    begin()
    with _silence():
        world, parser = _victim.world(), _parser(data)
        with watching.nothing_else_done():
            return _serve(data, world, parser)


def make(chance: random.Random) -> bytes:
    """Returns a message of the grammar that is not too long."""
    grammar = Grammar(chance)
    while True:
        made = grammar.message()
        if len(made) <= _LENGTH_LIMIT:
            return made


def seeds() -> list[bytes]:
    """Returns messages of the grammar."""
    return [make(random.Random(number)) for number in range(60)]


TARGET = Target(
    "strict_member",
    run,
    seeds,
    length_limit=_LENGTH_LIMIT,
    make=make,
    begin=begin,
    end=forget,
)
