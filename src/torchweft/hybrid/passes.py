"""Pulls the rows of all tables that a forward pass looks up at once: one call to each server.

A model looks its tables up one by one, somewhere in its forward pass, so each lookup would be a
call of its own. But ids are mostly arguments of the model, or slices of these. So each pass notes
for its lookups which arguments they were of. When the next pass begins, those places in *its*
arguments are looked up together.

Rules of the file: what a pass before did is only an expectation. A lookup takes expected rows if
its input has the same values as the expected one; otherwise it is a call of its own. Rows are
expected for one pass of one step, and each once. Expected rows that no lookup takes are never
pushed. So a wrong expectation costs time and bytes, and changes no result.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchweft.closing import Closing
from torchweft.embedding import InputError, Jagged, RowStream, Tables
from torchweft.embedding.inputs import parts_of
from torchweft.embedding.lookup import Flats, Lookup, Pull

B = TypeVar("B")
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and named arguments of a model."""
Path = tuple[Callable[[Any], Any], ...]
"""The steps from the arguments of a model to a tensor in them, or to a slice of one."""


class Noted(NamedTuple):
    """A lookup, and where its input was in the arguments of the model.

    Attributes:
        table: Name of the table.
        paths: Of ids, offsets and weights; None for those that were not passed.
        includes_last: The option of ``Jagged``.
    """

    table: str
    paths: tuple[Path | None, ...]
    includes_last: bool


class Expected(NamedTuple):
    """A lookup that a pass is expected to make.

    Attributes:
        given: Its input; the tensors are copies.
        lookup: Its rows.
    """

    given: Jagged
    lookup: Lookup


class ModelPasses:
    """The forward passes of a model; not thread-safe.

    Args:
        tables: The tables.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._notes: Sequence[Noted] = ()
        self._next_notes: list[Noted] = []
        self._sources: ArgumentPaths | None = None
        self._is_running = False
        self._awaited: dict[str, list[Expected]] | None = None
        self._expected: dict[str, list[Expected]] = {}

    @property
    def saved_by(self) -> str:
        """What a ``state_dict`` of the model lacks, and how that is saved."""
        return self._tables.weft_saved_by

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs a block in which the module is called."""
        self._is_running = True
        try:
            yield
            self._notes = tuple(self._next_notes)
        finally:
            self._is_running, self._sources, self._expected = False, None, {}

    def begin(self, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Pulls what the module is expected to look up; a hook before its forward pass."""
        if not self._is_running or self._sources is not None:
            return
        arguments = args, kwargs
        self._sources, self._next_notes = ArgumentPaths(arguments), []
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            self._expected = awaited
            return
        given, flats = self._foreseen(arguments)
        if len(given) > 1:  # A single lookup needs no company.
            self._expected = _by_table(given, self._tables.reader.pull(flats))

    def look_up(self, table: str, given: Jagged) -> Tensor:
        """Returns the output of a table; blocks unless its rows were expected."""
        paths = None if self._sources is None else self._sources.paths_of(given[:3])
        if paths is not None:
            self._next_notes.append(Noted(table, paths, given.include_last_offset))
        waiting = self._expected.get(table, [])
        for place, each in enumerate(waiting):
            if each.lookup.is_valid and _are_equal(each.given, given):
                return waiting.pop(place).lookup.outputs()[table]
        alone = given.ids if isinstance(given.ids, Tensor) and given.ids.is_nested else given
        found: Tensor = self._tables({table: alone})[table]
        return found

    def _foreseen(self, arguments: Arguments) -> tuple[list[tuple[str, Jagged]], list[Flats]]:
        """Returns the lookups that were noted and are possible, with these arguments."""
        found: list[tuple[str, Jagged]] = []
        flats: list[Flats] = []
        for noted in self._notes:
            try:
                values = [_at(path, arguments) for path in noted.paths]
            except (LookupError, AttributeError, TypeError, RuntimeError):
                continue  # The arguments have another form now.
            given = _copied(values, noted.includes_last)
            if given is None:
                continue
            try:
                flat = self._tables.reader.flats({noted.table: given})
            except InputError:
                continue  # If the pass does look it up, it says so.
            found.append((noted.table, given))
            flats.append(flat)
        return found, flats

    # Streams

    def stream(
        self, batches: Iterable[B], ahead: int, arguments: Callable[[B], Any]
    ) -> BatchStream[B]:
        """Returns the batches, with the rows of some batches pulled ahead."""

        def wrapped(batch: B) -> Mapping[str, Any]:
            given = arguments(batch)
            return {"arguments": (given if isinstance(given, tuple) else (given,), {})}

        self._tables.check_ahead(ahead)
        return BatchStream(RowStream(batches, ahead, wrapped, self._send))

    def _send(self, given: Mapping[str, Any], waiting: int) -> _BatchPull:
        found, flats = self._foreseen(given["arguments"])
        sent = self._tables.reader.send(flats, waiting) if found else None
        return _BatchPull(self, found, sent)

    def expect(self, found: dict[str, list[Expected]]) -> None:
        """Has the next pass use rows that are here."""
        self._awaited = found


@dataclasses.dataclass
class _BatchPull:
    """The lookups of a batch of a stream."""

    passes: ModelPasses
    given: Sequence[tuple[str, Jagged]]
    sent: Pull | None

    def outputs(self) -> dict[str, Tensor]:
        """Waits for the rows, and has the next pass use them."""
        if self.sent is not None:
            self.passes.expect(_by_table(self.given, self.sent.received()))
        return {}

    def cancel(self) -> None:
        """Ends the pull."""
        if self.sent is not None:
            self.sent.cancel()


class BatchStream(Closing, Generic[B]):
    """Yields batches in order, whose rows are here; see ``HybridModel.stream``.

    Also a context manager, which closes it. Not thread-safe.

    Args:
        rows: Pulls the rows.
    """

    def __init__(self, rows: RowStream[B]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[B]:
        return self

    def __next__(self) -> B:
        batch, _ = next(self._rows)
        return batch

    def close(self) -> None:
        """Cancels the pulls that are under way. The stream is at its end then."""
        self._rows.close()


# Where tensors are in the arguments of a model


class ArgumentPaths:
    """The tensors in the arguments of a model, by identity and by memory.

    Args:
        arguments: The arguments.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._paths: dict[int, Path] = {}
        self._by_memory: dict[int, list[tuple[Tensor, Path]]] = {}
        for path, tensor in _tensors(arguments, ()):
            self._paths.setdefault(id(tensor), path)
            if _has_slices(tensor):
                memory = tensor.untyped_storage().data_ptr()
                self._by_memory.setdefault(memory, []).append((tensor, path))

    def paths_of(self, parts: Iterable[Any]) -> tuple[Path | None, ...] | None:
        """Returns the path of each tensor; None if one is not among the arguments."""
        found: list[Path | None] = []
        for each in parts:
            path = None if each is None else self._find(each)
            if each is not None and path is None:
                return None
            found.append(path)
        return tuple(found)

    def _find(self, tensor: Any) -> Path | None:
        path = self._paths.get(id(tensor))
        if path is not None or not isinstance(tensor, Tensor) or not _has_slices(tensor):
            return path
        for whole, to_whole in self._by_memory.get(tensor.untyped_storage().data_ptr(), ()):
            slicing = _slicing(whole, tensor)
            if slicing is not None:
                return *to_whole, slicing
        return None


def _has_slices(tensor: Tensor) -> bool:
    return not tensor.is_nested and tensor.layout is torch.strided


def _at(path: Path | None, arguments: Any) -> Any:
    """Returns the value at a path in some arguments; None if there is no path."""
    if path is None:
        return None
    for step in path:
        arguments = step(arguments)
    return arguments


def _slicing(whole: Tensor, part: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Returns the step from a tensor to a slice of it; None if the other tensor is no slice."""
    offset = part.storage_offset() - whole.storage_offset()
    for dim, (size, stride) in enumerate(zip(whole.shape, whole.stride(), strict=True)):
        start, rest = divmod(int(offset), int(stride)) if stride else (0, offset)
        length = part.shape[dim] if part.dim() == whole.dim() else 0
        if rest or not 0 <= start < size or start + length > size:
            continue

        def slicing(
            tensor: Tensor, dim: int = dim, start: int = start, length: int = length
        ) -> Tensor:
            return tensor.narrow(dim, start, length) if length else tensor.select(dim, start)

        if _form(slicing(whole)) == _form(part):
            return slicing
    return None


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    """Yields the tensors in tuples, lists, dicts and dataclasses, with the steps to each."""
    within: Iterable[tuple[Callable[[Any], Any], Any]] = ()
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        within = ((operator.itemgetter(place), each) for place, each in enumerate(value))
    elif isinstance(value, Mapping):
        within = ((operator.itemgetter(key), each) for key, each in value.items())
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        within = ((operator.attrgetter(name), getattr(value, name)) for name in names)
    for step, each in within:
        yield from _tensors(each, (*path, step))


# Inputs of lookups


def _copied(values: Sequence[Any], includes_last: bool) -> Jagged | None:
    """Returns copies of the parts of an input; None if these cannot be looked up beforehand."""
    if not all(each is None or isinstance(each, Tensor) for each in values):
        return None
    plain = _plain(Jagged._make([*values, includes_last]))
    # A gradient belongs to the tensor that the model passes.
    if plain is None or any(each is not None and each.requires_grad for each in plain[:3]):
        return None
    copies = [None if each is None else each.clone() for each in plain[:3]]
    return Jagged._make([*copies, plain.include_last_offset])


def _plain(given: Jagged) -> Jagged | None:
    """Returns an input without nested tensors; None for one that no table takes."""
    if not isinstance(given.ids, Tensor):
        return None
    if not given.ids.is_nested:
        return given
    if given.ids.layout is not torch.jagged:
        return None
    return Jagged(*parts_of(given.ids), include_last_offset=True)


def _are_equal(expected: Jagged, given: Jagged) -> bool:
    plain = _plain(given)
    if plain is None or plain.include_last_offset != expected.include_last_offset:
        return False
    return all(map(_is_same, expected[:3], plain[:3]))


def _is_same(expected: Tensor | None, given: Any) -> bool:
    if expected is None or not isinstance(given, Tensor):
        return expected is given
    return (
        not given.requires_grad
        and (expected.dtype, expected.device) == (given.dtype, given.device)
        and torch.equal(expected, given)
    )


def _by_table(
    given: Sequence[tuple[str, Jagged]], lookups: Sequence[Lookup]
) -> dict[str, list[Expected]]:
    found: dict[str, list[Expected]] = {}
    for (table, own), each in zip(given, lookups, strict=True):
        found.setdefault(table, []).append(Expected(own, each))
    return found
