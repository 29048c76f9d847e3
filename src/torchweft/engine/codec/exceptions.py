"""Sends errors to other workers: type, message, attributes, causes, and where each was raised.

Pickle rebuilds an exception by calling its type with ``args``. If the constructor takes other
arguments than it passes to ``Exception.__init__``, that call raises, or nests the message in
another message. So the type's own constructor is not called here. The built-in base type makes the
object and restores ``args`` and the fields written in C; then the attributes are set. A type's own
reduction is tried first.

If the receiver cannot import the type, the nearest base that can be made with one string replaces
it, with the name of the original in the text. Without such a base, ``RemoteError`` does.
KeyboardInterrupt, SystemExit, and all other errors that are not an ``Exception``, except groups,
become ``RemoteError`` too: under their own type they would stop the receiver, not inform it.

Nothing in this file raises: a second error would hide the first. Packing runs code of the error and
its attributes, which may raise anything, even ``SystemExit``.
"""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from torchweft.columns import LAYOUT, printable
from torchweft.engine.codec import makers, values
from torchweft.engine.codec.diagnosis import slots_of
from torchweft.engine.codec.functions import MAIN_MODULES, find_global
from torchweft.engine.codec.objects import pack, pack_plain, unpack
from torchweft.engine.codec.registry import rebuilds_pickled
from torchweft.engine.codec.tensors import as_memory, describe, read, rebuild, with_flags
from torchweft.engine.codec.tracebacks import (
    PRINTS_NOTES,
    RemoteTraceback,
    notes_with_place,
    places_of,
    with_lines_from_here,
)
from torchweft.engine.codec.values import limit_of_repetition
from torchweft.engine.threads.interrupts import is_of_handler
from torchweft.errors import ProtocolError, RemoteError, WeftError

T = TypeVar("T")

_CHAIN_LIMIT = 64
"""How many errors deep an error may be, by causes, contexts and members of groups."""
_ERRORS_LIMIT = 1000
_LEFT_OUT = frozenset({"name_from"})
"""With it, Python imports a module that the error names, to give advice when printing the error."""
_NOTES = "__notes__"
ORIGINAL_TYPE = "_original_type"
"""Attribute that holds the original type, on a type that replaces it on this worker only."""
_HEAP_TYPE = 1 << 9  # type.__flags__ of a type that was not defined statically in C
_REDUCTIONS = frozenset({"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"})
GROUPS: tuple[Any, ...] = tuple(
    getattr(builtins, name) for name in ("BaseExceptionGroup",) if hasattr(builtins, name)
)


@rebuilds_pickled
class ScriptError(torch.jit.Error, RuntimeError):
    """An error that a compiled function raised on another worker.

    Here it is a ``torch.jit.Error``; users of ``torch.distributed.rpc`` catch a RuntimeError.
    """


class _Record(NamedTuple):
    """One exception of a chain, made only of plain values."""

    type_name: str
    text: str
    bases: tuple[tuple[str, str], ...]  # module and qualified name, the nearest first
    is_error: bool  # an Exception, or a group
    name: tuple[str, str] | None  # where the receiver finds the type
    kind: Any  # the type itself if `name` is None; this and `whole` are blobs, see _blob
    whole: Any
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]
    members: tuple[int, ...]
    cause: int | None
    context: int | None
    is_context_hidden: bool


class _Class(NamedTuple):
    """What the errors of one class have in common."""

    kind: Any
    name: str
    bases: tuple[tuple[str, str], ...]
    native: Any
    """The built-in class that decides how its objects are laid out."""
    has_slots: bool
    has_own_reduce: bool


_CLASSES_LIMIT = 1024
_classes: dict[int, _Class] = {}
"""By ``id``: a metaclass of the program may refuse to be hashed."""


def _class_of(kind: Any) -> _Class:
    found = _classes.get(id(kind))
    if found is None:
        if len(_classes) >= _CLASSES_LIMIT:
            _classes.clear()
        own = [base for base in kind.__mro__ if base.__flags__ & _HEAP_TYPE]
        native = kind
        while native.__flags__ & _HEAP_TYPE:
            native = native.__base__
        found = _classes[id(kind)] = _Class(
            kind,
            name=f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
            bases=tuple((f"{base.__module__}", base.__qualname__) for base in kind.__mro__[1:-1]),
            native=native,
            has_slots=any("__slots__" in vars(base) for base in own),
            has_own_reduce=any(
                not _REDUCTIONS.isdisjoint(vars(base))
                for base in own
                if base is not WeftError  # A record keeps the same state.
            ),
        )
    return found


def pack_error(
    error: BaseException, worker: str, *, main_by_name: bool = True, is_plain: bool = False
) -> bytes:
    """Returns an exception, with its causes and contexts, as bytes.

    Args:
        error: The exception that a user function or Weft raised on this worker.
        worker: Name of this worker, for the text of the traceback.
        main_by_name: Whether the receiver runs the same main program.
        is_plain: Whether to leave out values that cannot be plain, for a receiver that reads no
            pickles.
    """
    try:
        return _encoded(worker, _Packer(worker, main_by_name, is_plain).pack(error))
    except BaseException:
        return _encoded(worker, [_bare_record(error, worker)])


def _encoded(worker: str, records: list[_Record]) -> bytes:
    content = (worker, [tuple(record) for record in records])
    payload = values.encode(content, [], True)
    return values.Encoder(True, ()).encode(content) if payload is None else payload


def _refuse_name(name: bytes) -> Any:
    raise ProtocolError(f"an error message names {name!r}")


def unpack_error(
    content: bytes | bytearray | memoryview,
    *,
    find: Callable[[str, str], object] = find_global,
    unpack: Callable[[Any, Any, Any], Any] = unpack,
    is_bounded: bool = False,
) -> BaseException:
    """Returns the exception that ``pack_error`` was given on another worker.

    Its notes say where it was raised; see ``torchweft.engine.codec.tracebacks``.

    Args:
        content: The bytes that ``pack_error`` returned.
        find: Returns the class with a module and a name, or raises.
        unpack: Does the same as ``objects.unpack``.
        is_bounded: Whether few bytes may not stand for a large error, as a stranger could send.
    """
    try:
        limit_bytes = limit_of_repetition(len(content), ()) if is_bounded else None
        worker, rows = values.decode(
            content, (), (), _refuse_name, limit_bytes=limit_bytes, make=makers.made_plainly
        )
        if len(rows) > _ERRORS_LIMIT:
            raise ValueError(f"it has {len(rows)} parts, more than {_ERRORS_LIMIT}")
        records = [_Record(*row) for row in rows]
        error = _Rebuilder(records, worker, find, unpack).rebuild()
        if not PRINTS_NOTES:
            places = [place for part in chain(error) for place in places_of(part)]
            _assign(chain(error)[-1], "__cause__", RemoteTraceback("\n".join(places)))
        return error
    except Exception as failure:
        if is_of_handler(failure):
            raise
        return RemoteError(f"a remote error could not be read: {failure!r}")


def fresh_copy(error: BaseException) -> BaseException:
    """Returns an equal error without traceback, to be raised in place of a stored error.

    Raising an error adds the frames that it passes; storing it then keeps all objects of those
    frames. An error that cannot be copied is returned itself.
    """
    return copy_as(type(error), error)


def _as_raised(error: BaseException) -> BaseException:
    """Returns an error as the type that it had on the worker where it was raised."""
    kind = vars(type(error)).get(ORIGINAL_TYPE)
    return error if kind is None else copy_as(kind, error).with_traceback(error.__traceback__)


def copy_as(kind: Any, error: BaseException) -> BaseException:
    """Returns an equal error of ``kind``, of the same layout; itself if it cannot be copied."""
    copy = _attempt(_copied, kind, error)
    return error if copy is None else copy


def _copied(kind: Any, error: BaseException) -> BaseException:
    arguments, attributes = _state(error)
    copy = _new(kind, arguments)
    for name, value in attributes.items():
        _assign(copy, name, list(value) if name == _NOTES else value)
    for name in ("__cause__", "__context__", "__suppress_context__"):
        _assign(copy, name, getattr(error, name))
    return copy


def _new(kind: Any, arguments: Sequence[Any]) -> BaseException:
    """Makes an error without the constructor of its type."""
    native = _class_of(kind).native
    made: BaseException = native.__new__(kind, *arguments)
    native.__init__(made, *arguments)
    return made


def _attempt(make: Callable[..., T], *args: Any) -> T | None:
    """Returns what a function returns; None if it raises an error."""
    try:
        return make(*args)
    except Exception as failure:
        if is_of_handler(failure):
            raise
        return None


class _Packer:
    """Makes the records of one exception and of its members, causes and contexts."""

    def __init__(self, worker: str, main_by_name: bool, is_plain: bool) -> None:
        self._worker = worker
        self._main_by_name = main_by_name
        self._is_plain = is_plain
        self._numbers: dict[int, int] = {}
        self._records: list[_Record | None] = []
        self._depth = 0

    def pack(self, error: BaseException) -> list[_Record]:
        self._add(error)
        return [record for record in self._records if record is not None]

    def _add(self, error: BaseException | None) -> int | None:
        """Returns the number of the record for ``error``; each one is made once."""
        if error is None or isinstance(error, RemoteTraceback):
            return None  # Its text is in the notes.
        number = self._numbers.get(id(error))
        is_within = self._depth < _CHAIN_LIMIT and len(self._records) < _ERRORS_LIMIT
        if number is None and is_within:
            number = self._numbers[id(error)] = len(self._records)
            self._records.append(None)
            self._depth += 1
            self._records[number] = self._record(_as_raised(error))
            self._depth -= 1
        return number

    def _record(self, error: BaseException) -> _Record:
        kind = ScriptError if type(error) is torch.jit.Error else type(error)
        exceptions: Any = error.exceptions if isinstance(error, GROUPS) else ()
        members = [self._add(member) for member in exceptions]
        arguments, attributes = _state(error)
        by_name = _is_importable(kind) and (
            self._main_by_name or kind.__module__ not in MAIN_MODULES
        )
        is_by_pickle = _class_of(kind).has_own_reduce
        bare = _bare_record(error, self._worker)
        blobs = {name: self._blob(value) for name, value in attributes.items()} | bare.attributes
        return bare._replace(
            name=(kind.__module__, kind.__qualname__) if by_name else None,
            kind=None if by_name or self._is_plain else self._blob(kind),
            whole=self._blob(error) if is_by_pickle and not self._is_plain else None,
            arguments=() if exceptions else tuple(map(self._argument, arguments)),
            attributes={name: blob for name, blob in blobs.items() if blob is not None},
            members=tuple(number for number in members if number is not None),
            cause=self._add(error.__cause__),
            context=self._add(error.__context__),
        )

    def _argument(self, value: object) -> Any:
        blob = self._blob(value)
        return self._blob(shown(value)) if blob is None else blob

    def _blob(self, value: object) -> Any:
        """Packs a value with its tensors, or returns None."""
        if type(value) in _ATOMS:
            return (value,)
        try:
            packed = (pack_plain if self._is_plain else pack)(
                value, main_by_name=self._main_by_name
            )
            if packed.externals:
                return None  # a reference needs the layer that counts references
            table, buffers = describe(packed.tensors)
            return packed.payload, table, [bytes(as_memory(each.cpu())) for each in buffers]
        except BaseException:
            return None


_ATOMS = (str, int, float, bool, bytes, type(None))


class _Rebuilder:
    """Makes exceptions out of records."""

    def __init__(
        self,
        records: list[_Record],
        worker: str,
        find: Callable[[str, str], object],
        unpack: Callable[[Any, Any, Any], Any],
    ) -> None:
        self._records = records
        self._worker = worker
        self._find = find
        self._unpack = unpack
        self._made: dict[int, BaseException] = {}
        self._sizes: dict[int, int] = {}

    def rebuild(self) -> BaseException:
        errors = [self._once(number) for number in range(len(self._records))]
        # Link them last: contexts may form a cycle, also through the members of a group.
        for error, record in zip(errors, self._records, strict=True):
            _assign(error, "__cause__", None if record.cause is None else errors[record.cause])
            _assign(
                error, "__context__", None if record.context is None else errors[record.context]
            )
            _assign(error, "__suppress_context__", record.is_context_hidden)
        return errors[0]

    def _once(self, number: int) -> BaseException:
        error = self._made.get(number)
        if error is None:
            error = self._made[number] = self._make(self._records[number])
            self._sizes[number] = 1
            if isinstance(error, GROUPS):
                self._sizes[number] += self._size_of(self._records[number].members)
        return error

    def _size_of(self, members: tuple[int, ...]) -> int:
        """Counts errors as often as they are printed: in each group that has them."""
        return sum(self._sizes[number] for number in members)

    def _make(self, record: _Record) -> BaseException:
        error = self._exact(record) if record.is_error else None
        if error is None and record.is_error:
            error = self._nearest(record)
        if error is None:
            text = f"{record.type_name}: {record.text}" if record.text else record.type_name
            error = RemoteError(text, type_name=record.type_name, worker=self._worker)
        for name, blob in record.attributes.items():
            self._set(error, name, blob)
        return error

    def _exact(self, record: _Record) -> BaseException | None:
        name = record.name
        kind = _attempt(self._find, *name) if name else _attempt(self._open, record.kind)
        if not _is_exception_type(kind):
            return None
        error: Any = None if record.whole is None else _attempt(self._open, record.whole)
        if type(error) is not kind:
            error = _attempt(self._from_parts, record, kind)
        is_right = isinstance(error, (Exception, *GROUPS))
        return error if is_right else None

    def _from_parts(self, record: _Record, kind: Any) -> BaseException:
        if record.members:
            members = [self._once(number) for number in record.members]
            if self._size_of(record.members) > _ERRORS_LIMIT:
                raise ValueError(f"a group has more than {_ERRORS_LIMIT} errors")
            group: BaseException = _class_of(kind).native.__new__(kind, record.text, members)
            return group
        return _new(kind, [self._open(blob) for blob in record.arguments])

    def _nearest(self, record: _Record) -> BaseException | None:
        text = f"{record.text} [{record.type_name} on worker {self._worker!r}]"
        for module, name in record.bases:
            base: Any = _attempt(self._find, module, name)
            if base is Exception:
                return None  # RemoteError is an Exception too, and says more.
            error = _attempt(base, text) if _is_exception_type(base) else None
            if isinstance(error, Exception):
                return error
        return None

    def _set(self, error: BaseException, name: str, blob: Any) -> None:
        if name in _LEFT_OUT or (name.startswith("__") and name != _NOTES):
            return
        try:
            value = self._open(blob)
            if name == _NOTES:
                value = [with_lines_from_here(printable(note, LAYOUT)) for note in value]
        except Exception as failure:
            if is_of_handler(failure):
                raise
            return
        try:
            _assign(error, name, value)
        except Exception as failure:  # Such as of a property without a setter.
            if is_of_handler(failure):
                raise
            vars(error)[name] = value

    def _open(self, blob: Any) -> Any:
        if len(blob) == 1:
            return blob[0]
        payload, table, buffers = blob
        tensors, flags = rebuild(read(table), [bytearray(buffer) for buffer in buffers])
        return self._unpack(payload, with_flags(tensors, flags), ())


def _bare_record(error: BaseException, worker: str) -> _Record:
    """Returns the record of an exception that is made without its own code, except ``str``."""
    kind, text = _class_of(type(error)), _text(error)
    return _Record(
        type_name=kind.name,
        text=text,
        bases=kind.bases,
        is_error=isinstance(error, (Exception, *GROUPS)),
        name=None,
        kind=None,
        whole=None,
        arguments=((text,),),
        attributes={_NOTES: (notes_with_place(error, worker),)},
        members=(),
        cause=None,
        context=None,
        is_context_hidden=bool(BaseException.__getattribute__(error, "__suppress_context__")),
    )


def _state(error: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the constructor arguments of the built-in type, and all attributes."""
    kind = _class_of(type(error))
    reduced = kind.native.__reduce__(error)
    attributes = dict(reduced[2]) if len(reduced) > 2 and isinstance(reduced[2], dict) else {}
    if kind.has_slots:
        attributes.update(slots_of(error))
    return tuple(reduced[1]), attributes


def _is_exception_type(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _is_importable(kind: type) -> bool:
    try:
        return find_global(kind.__module__, kind.__qualname__) is kind
    except BaseException:
        return False


def _assign(error: BaseException, name: str, value: object) -> None:
    BaseException.__setattr__(error, name, value)  # a frozen dataclass would refuse


def chain(error: BaseException) -> list[BaseException]:
    """Returns an error and its causes or contexts, in the reverse of their printed order."""
    found = [error]
    seen = {id(error)}
    while True:
        following = error.__cause__
        if following is None and not error.__suppress_context__:
            following = error.__context__
        if following is None or id(following) in seen:
            return found
        seen.add(id(following))
        found.append(following)
        error = following


def _text(error: BaseException) -> str:
    try:
        text = str(error.message) if isinstance(error, GROUPS) else str(error)
        return str.__str__(text)  # Without a subclass of the program.
    except BaseException as failure:
        return f"<its text cannot be made: {type(failure).__name__}>"


def shown(value: object) -> str:
    """Returns the ``repr`` of a value, or its type where that raises."""
    try:
        return repr(value)
    except BaseException:
        return f"<{type(value).__name__} object>"


# Errors under ``torchweft.compat`` are RuntimeErrors as well as their original type.
# ``torch.distributed.rpc`` raises a RuntimeError for most errors of remote functions, and some
# programs catch that; others catch the original type.


def as_runtime_error(error: BaseException) -> BaseException:
    """Returns an error that is a RuntimeError as well as its original type.

    It has the name, the text and the attributes of the original. If there can be no such type, the
    original is returned.
    """
    if isinstance(error, RuntimeError) or not isinstance(error, Exception):
        return error
    both = _attempt(_both, type(error))
    return error if both is None else copy_as(both, error)


@functools.lru_cache(maxsize=1024)
def _both(kind: Any) -> Any:
    """Returns a type that derives from ``kind`` and from RuntimeError."""

    def reduce(error: Any, protocol: Any) -> Any:
        return as_runtime_error, (copy_as(kind, error),)

    def fill(names: dict[str, Any]) -> None:
        names.update(
            {
                "__module__": kind.__module__,
                "__qualname__": kind.__qualname__,
                "__doc__": kind.__doc__,
                "__reduce_ex__": reduce,
                ORIGINAL_TYPE: kind,
            }
        )

    return types.new_class(kind.__name__, (kind, RuntimeError), {}, fill)
