"""The tensors of a state: a version is a flat tensor and its layout, which a module takes over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.extending import rebuilds_plain
from torchweft.memory import has_memory

ALIGNMENT = 64
"""Of each tensor, in bytes: that of a line of the processor's cache."""

Source = nn.Module | Mapping[str, Tensor]
"""A state: a module, or tensors by name."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class WeightsMismatch(ConfigurationError):
    """The tensors of a state are not those of the published one; nothing has changed.

    Attributes:
        tensor: Name of the first tensor that differs.
        missing: Published names that the state lacks.
        unexpected: Names of the state that are not published.
    """

    tensor: str = ""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@rebuilds_plain
class Entry(NamedTuple):
    """One tensor of a state.

    Attributes:
        shape: Its shape.
        dtype: Its published type.
        offset: Its place in the memory of a version, in bytes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@rebuilds_plain
class Layout(NamedTuple):
    """The tensors of a state, in the order of their places.

    Attributes:
        entries: The tensors by name. Several names of one tensor have one place.
        size_bytes: Bytes of a version, a multiple of the alignment.
    """

    entries: dict[str, Entry]
    size_bytes: int

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Returns the tensors of a version, views of its memory.

        Args:
            memory: Bytes of the version, of shape ``(size_bytes,)`` and type uint8.
        """
        found = {}
        for name, entry in self.entries.items():
            part = memory[entry.offset : entry.offset + entry.size_bytes]
            found[name] = part.view(entry.dtype).view(entry.shape)
        return found

    def gaps(self) -> list[slice]:
        """Returns the bytes between tensors, which have no meaning."""
        ends = sorted({(each.offset, each.size_bytes) for each in self.entries.values()})
        starts = [offset for offset, _ in ends[1:]] + [self.size_bytes]
        filled = [offset + size_bytes for offset, size_bytes in ends]
        return [slice(*each) for each in zip(filled, starts, strict=True) if each[0] < each[1]]


def tensors_of(source: Source) -> dict[str, Tensor]:
    """Returns the tensors of a state by name: parameters and buffers, or the entries of a dict.

    Raises:
        ArgumentTypeError: An entry is no dense tensor, or its name no text.
    """
    if isinstance(source, nn.Module):
        found = source.state_dict(keep_vars=True)
    elif isinstance(source, Mapping):
        found = dict(source)
    else:
        raise ArgumentTypeError(
            f"{type(source).__name__} has no weights: pass a module, or a dict of tensors by name"
        )
    for name, tensor in found.items():
        if type(name) is not str or not isinstance(tensor, Tensor):
            raise ArgumentTypeError(
                f"{name!r} is {type(tensor).__name__}: a state has tensors by name; leave others "
                "out, for instance by passing a dict"
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else "sparse"
            raise ArgumentTypeError(f"{name!r} is a {kind} tensor: pass a dense one")
        if not has_memory(tensor):
            raise ArgumentTypeError(
                f"{name!r} is a {type(tensor).__qualname__}, which has no memory of its own: pass "
                "a dict of plain tensors, of a DTensor its full_tensor()"
            )
    if not found:
        raise ArgumentTypeError("the state has no tensors: pass a module with weights, or a dict")
    return found


def layout_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Layout:
    """Returns the layout of a state; tensors that share their memory get one place.

    Args:
        tensors: The tensors by name.
        dtype: The type that floating-point tensors are published in; None for their own.
    """
    entries: dict[str, Entry] = {}
    places: dict[object, int] = {}
    end = 0
    for name, tensor in tensors.items():
        key: object = _memory_of(tensor) if tensor.numel() else name
        published = _published(tensor, dtype)
        entry = Entry(tuple(tensor.shape), published, places.setdefault(key, end))
        entries[name] = entry
        if entry.offset == end:
            end += -(-entry.size_bytes // ALIGNMENT) * ALIGNMENT
    return Layout(entries, max(end, ALIGNMENT))


def _memory_of(tensor: Tensor) -> object:
    """Returns what is equal for tensors that share all of their memory, and its meaning."""
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, bits


def _published(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def check_same(
    layout: Layout, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, subject: str
) -> None:
    """Compares a state with the published one.

    Args:
        layout: The published one.
        tensors: The state.
        dtype: The type in which the state is published; None for its own.
        subject: A noun phrase for the state, which begins the message.

    Raises:
        WeightsMismatch: They differ; names the first tensor that does.
    """
    missing = tuple(name for name in layout.entries if name not in tensors)
    unexpected = tuple(name for name in tensors if name not in layout.entries)
    if missing or unexpected:
        texts = [f"lacks {_some(missing)}"] if missing else []
        texts += [f"has {_some(unexpected)}, not published"] if unexpected else []
        raise WeightsMismatch(
            f"{subject} {' and '.join(texts)}; publisher and subscriber need the same model",
            tensor=(missing or unexpected)[0],
            missing=missing,
            unexpected=unexpected,
        )
    for name, entry in layout.entries.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != entry.shape:
            raise WeightsMismatch(
                f"{subject} has {name!r} with shape {list(tensor.shape)}, and {list(entry.shape)} "
                "is published; publisher and subscriber need the same model",
                tensor=name,
            )
        found = _published(tensor, dtype)
        if found != entry.dtype:
            raise WeightsMismatch(
                f"{subject} has {name!r} in {found}, and {entry.dtype} is published; pass "
                "dtype=... to the publisher, or convert the subscriber's model",
                tensor=name,
            )


def check_shared(layout: Layout, tensors: Mapping[str, Tensor], subject: str) -> None:
    """Checks that tensors with one place in the layout still share their memory.

    Args:
        layout: The published one.
        tensors: The state, of the same names and shapes.
        subject: A noun phrase for the state, which begins the message.

    Raises:
        WeightsMismatch: They do not: one of them would be published under the names of all.
    """
    firsts: dict[int, tuple[str, object]] = {}
    for name, entry in layout.entries.items():
        if entry.size_bytes:
            memory = _memory_of(tensors[name])
            first, shared = firsts.setdefault(entry.offset, (name, memory))
            if memory != shared:
                raise WeightsMismatch(
                    f"{subject} has {first!r} and {name!r} apart, and they shared their memory "
                    "when the publisher was made; make another publisher for the changed model",
                    tensor=name,
                )


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


# The change of a module to a version, between two of its batches


class Switch(NamedTuple):
    """A prepared change of a state to a version.

    Attributes:
        swaps: Parameters, and the memory that they are to use.
        copies: Tensors that keep their memory, and their new values.
    """

    swaps: list[tuple[Tensor, Tensor]]
    copies: list[tuple[Tensor, Tensor]]

    def run(self) -> BaseException | None:
        """Makes the whole change, also when it is interrupted; returns the interrupt."""
        try:
            self._run()
        except BaseException as interrupt:
            self._run()  # Nothing is left half way: all steps can be repeated.
            return interrupt
        return None

    def _run(self) -> None:
        # Tensors that were made in this mode can be written only in it, and others in it as well.
        with torch.inference_mode():
            for target, value in self.copies:
                target.copy_(value)
            for target, value in self.swaps:
                target.data = value


def prepare(
    targets: Mapping[str, Tensor], values: Mapping[str, Tensor], *, in_place: bool
) -> Switch:
    """Returns the change of a state to new values.

    Parameters on the CPU take the memory of the values. Buffers, which a module may write, tensors
    of a dict, those that were made in inference mode, and those on other devices keep theirs.

    Raises:
        WeightsMismatch: Two names are one tensor here, and their values differ.
    """
    swaps: list[tuple[Tensor, Tensor]] = []
    copies: list[tuple[Tensor, Tensor]] = []
    firsts: dict[int, str] = {}
    for name, target in targets.items():
        first = firsts.setdefault(id(target), name)
        if first != name:
            if not _is_equal(values[first], values[name]):
                raise WeightsMismatch(
                    f"{first!r} and {name!r} are one tensor of the subscriber, and have different "
                    "values at the publisher; publisher and subscriber need the same model",
                    tensor=name,
                )
            continue
        is_swapped = not in_place and isinstance(target, nn.Parameter)
        is_swapped = is_swapped and target.device == values[name].device
        is_swapped = is_swapped and not target.is_inference()  # It would be of both modes then.
        (swaps if is_swapped else copies).append((target, values[name]))
    return Switch(swaps, copies)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors have the same bytes."""
    if one.data_ptr() == other.data_ptr():
        return True
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
