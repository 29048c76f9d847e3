"""One server's part of a stack: rows, and the optimizer's state beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from torchweft import memory
from torchweft.embedding import initial
from torchweft.embedding.errors import IdOutOfRange, InputError
from torchweft.embedding.layout import Member, Stack
from torchweft.embedding.rows import Bags, Entries, Part, pooled, put, summed, take
from torchweft.embedding.rules import Rule
from torchweft.extending import check_types

_INTEGERS: Final = (torch.int32, torch.int64)
_VALUE_PARTS: Final = 2
_ENTRY_PARTS: Final = 4
CHANGED: Final = "changed"
"""The name of the positions of rows in an increment."""
_CHUNK_BYTES: Final = 1 << 20
"""Gradients that are applied at a time: they stay in the cache, and malloc keeps their memory."""


class Gradients(NamedTuple):
    """Gradients of rows of one stack on one server.

    Attributes:
        used: Bit i tells that the stack's member i was looked up.
        parts: The gradients.
    """

    used: int
    parts: Sequence[Part]


class Shard:
    """Rows of the tables of a stack; not thread-safe.

    Args:
        stack: The stack.
        server: Position of this server among those of the stack.
        seed: The seed of the collection.
    """

    def __init__(self, stack: Stack, server: int, seed: int) -> None:
        self.stack = stack
        self.name = stack.servers[server]
        self._server = server
        self.weights = _memory(stack.size_on(server), stack.dim, stack.dtype)
        self.steps = torch.zeros(len(stack.members), dtype=torch.float64, device="cpu")
        """How many steps each member has made."""
        self.changed = torch.zeros(len(self.weights), dtype=torch.int64, device="cpu")
        """The version of the server after the step that changed each row last."""
        self._rule: Rule | None = None
        self.state: dict[str, Tensor] = {}
        self._scratch: dict[str, Tensor] = {}
        """Copies of the rows that are changed at a time; overwritten by the next ones."""
        self._begin(seed)

    def _begin(self, seed: int) -> None:
        """Sets the initial values."""
        for _, member in self.stack.held_on(self._server):
            rows = self.rows_of(member)
            target = self.weights[member.base : member.base + len(rows)]
            initial.fill(target, member.config, rows, member.columns, seed)

    @property
    def used_rows(self) -> int:
        """The number of rows."""
        return len(self.weights)

    def rows_of(self, member: Member) -> range:
        """Returns the rows of a table that this shard has."""
        return member.rows_on(self._server, self.stack.stripes)

    def slice_of(self, number: int) -> slice:
        """Returns which rows of the tensors here are of a member."""
        member = self.stack.members[number]
        return slice(member.base, member.base + len(self.rows_of(member)))

    def note_changed(self, number: int, version: int) -> None:
        """Notes that all rows of a member are changed in a version."""
        self.changed[self.slice_of(number)] = version

    def held(self, number: int) -> dict[str, Tensor]:
        """Returns the rows of a member and the state beside them; nothing is copied."""
        rows = self.slice_of(number)
        state = {f"state.{name}": values[rows] for name, values in self.state.items()}
        return {"weights": self.weights[rows], **state}

    def copied(self, number: int) -> dict[str, Tensor]:
        """Returns copies of the rows of a member and of the state beside them, for a snapshot."""
        return {name: values.clone() for name, values in self.held(number).items()}

    def copied_since(self, number: int, version: int, steps: float) -> dict[str, Tensor]:
        """Returns copies of the rows of a member that changed since, for an increment.

        Args:
            number: The member.
            version: The version that they changed after.
            steps: The steps of the table at that version.

        Returns:
            As ``copied``, and the positions of the rows among those of the member.
        """
        rows = (self.changed[self.slice_of(number)] > version).nonzero().view(-1)
        held = {name: take(values, rows) for name, values in self.held(number).items()}
        return {CHANGED: rows, **held}

    def set_rule(self, rule: Rule) -> None:
        """Sets the optimizer, with new state."""
        self._rule = rule
        self.state = {
            name: _memory(len(self.weights), values.shape[1], values.dtype)
            for name, values in rule.state_for(self.weights[:0]).items()
        }
        for begin in range(0, len(self.weights), self._chunk_rows):
            rows = slice(begin, begin + self._chunk_rows)
            for name, values in rule.state_for(self.weights[rows]).items():
                self.state[name][rows] = values

    def changed_since(self, rows: Tensor, version: int) -> Tensor:
        """Returns which of some rows a pull that saw a version may have seen otherwise, ``(n,)``.

        Raises:
            IdOutOfRange: There is no such row.
        """
        self._check(rows)
        return self.changed[rows.long()] > version

    def pull(self, rows: Tensor) -> Tensor:
        """Returns rows.

        Raises:
            IdOutOfRange: There is no such row.
        """
        self._check(rows)
        return take(self.weights, rows)

    def pool(self, numbers: Tensor, bags: int, length: int, weights: Tensor | None) -> Tensor:
        """Returns the sums of bags of rows, ``(bags, dim)``.

        Args:
            numbers: The rows, of one bag after the other; then the lengths of bags, if they differ.
            bags: The number of bags.
            length: The length of each bag; 0 if they differ.
            weights: A factor for each row, or None.

        Raises:
            IdOutOfRange: There is no such row.
            InputError: The lengths or weights do not fit the rows.
        """
        check_types(bags=(bags, int), length=(length, int))
        self._check_numbers(numbers)
        count = length * bags if length else len(numbers) - bags
        if bags < 0 or length < 0 or count < 0 or (length and count != len(numbers)):
            raise self._bad_bags(len(numbers))
        rows, lengths = numbers[:count], numbers[count:]
        self._check(rows)
        self._check_weights(rows, weights)
        if length:
            starts = torch.arange(0, count, length, dtype=rows.dtype, device="cpu")
        else:
            self._check_lengths(rows, lengths)
            starts = lengths.cumsum(0, dtype=lengths.dtype).sub_(lengths)
        return pooled(self.weights, Bags(rows, starts, weights))

    def check(self, gradients: Gradients) -> None:
        """Checks gradients, before they count as part of a step.

        Raises:
            IdOutOfRange: There is no such row.
            InputError: The gradients do not fit the rows or the stack.
        """
        for part in gradients.parts:
            if len(part) == _VALUE_PARTS:
                rows, values = part
                self._check(rows)
                self._check_gradients(values, len(rows))
            elif len(part) == _ENTRY_PARTS:
                self._check_entries(part)
            else:
                raise self._refused(
                    f"was sent gradients of {self._tables()} in "
                    f"{len(part)} parts; send {_VALUE_PARTS} or {_ENTRY_PARTS}",
                )

    def apply(self, pushed: Sequence[Gradients], lr: float, divisor: int, version: int) -> None:
        """Makes one step of the optimizer with the sum of gradients, in their order.

        Args:
            pushed: Checked gradients, such as those of all trainers.
            lr: The learning rate.
            divisor: The sum is divided by it.
            version: The version of the server after this step.
        """
        assert self._rule is not None
        used = functools.reduce(lambda one, other: one | other, (each.used for each in pushed), 0)
        members = [number for number in range(len(self.steps)) if used >> number & 1]
        self.steps[members] += 1
        parts = self._admitted([part for each in pushed for part in each.parts])
        steps_of = self._steps_of()
        for rows, gradients in summed(parts, self._chunk_rows):
            if divisor > 1:
                gradients = gradients / divisor
            self._change(rows, gradients, lr, steps_of(rows), version)

    def _admitted(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Returns the gradients of those rows that are changed."""
        return parts

    def _change(
        self, rows: Tensor, gradients: Tensor, lr: float, step: Tensor, version: int
    ) -> None:
        """Changes rows that occur once."""
        assert self._rule is not None
        weights = self._copied("weights", self.weights, rows)
        state = {
            name: self._copied(f"state.{name}", values, rows) for name, values in self.state.items()
        }
        self._rule.apply(weights, state, gradients, lr, step)
        put(self.weights, rows, weights)
        for name, values in state.items():
            put(self.state[name], rows, values)
        self.changed.numpy()[rows.numpy()] = version

    def _copied(self, name: str, values: Tensor, rows: Tensor) -> Tensor:
        """Returns copies of at most a chunk of rows; they are valid until the next ones."""
        scratch = self._scratch.get(name)
        if scratch is None:
            size = min(self._chunk_rows, len(values))
            scratch = self._scratch[name] = values.new_empty(size, values.shape[1])
        return take(values, rows, into=scratch)

    @property
    def _chunk_rows(self) -> int:
        return max(1, _CHUNK_BYTES // self.stack.row_bytes)

    def _steps_of(self) -> Callable[[Tensor], Tensor]:
        """Returns a function that returns the number of steps of the tables of rows."""
        held = [(number, member.base) for number, member in self.stack.held_on(self._server)]
        steps = self.steps[[number for number, _ in held]]
        if bool((steps == steps[0]).all()):
            return lambda _: steps[0]
        bases = torch.tensor([base for _, base in held], device="cpu")

        def steps_of(rows: Tensor) -> Tensor:
            return steps[torch.searchsorted(bases, rows.long(), right=True) - 1].unsqueeze(1)

        return steps_of

    def _check_numbers(self, numbers: Tensor) -> None:
        if numbers.dtype not in _INTEGERS or numbers.dim() != 1:
            raise self._refused(
                f"was sent rows of {numbers.dtype} with {numbers.dim()} dimensions",
            )

    def _check(self, rows: Tensor) -> None:
        self._check_numbers(rows)
        if not len(rows):
            return
        low, high = (int(each) for each in torch.aminmax(rows))
        if low < 0 or high >= len(self.weights):
            row = low if low < 0 else high
            position = int((rows == row).nonzero()[0])
            raise IdOutOfRange(
                f"server {self.name!r} was asked for row {row} of a stack of {self._tables()}, "
                f"and has {len(self.weights)} rows of it",
                **self._named,
                id=row,
                position=position,
            )

    def _check_lengths(self, rows: Tensor, lengths: Tensor) -> None:
        if (len(lengths) and int(lengths.min()) < 0) or int(lengths.sum()) != len(rows):
            raise self._bad_bags(len(rows))

    def _bad_bags(self, count: int) -> InputError:
        return self._refused(
            f"was sent bags of {self._tables()} that do not fit their {count} ids",
        )

    def _check_weights(self, rows: Tensor, weights: Tensor | None) -> None:
        if weights is not None and (
            weights.shape != rows.shape or weights.dtype != self.stack.dtype
        ):
            raise self._refused(
                f"was sent weights {list(weights.shape)} of {weights.dtype} "
                f"for {len(rows)} ids of {self._tables()}",
            )

    def _check_entries(self, part: Part) -> None:
        numbers, count, weights, values = part
        check_types(count=(count, int))
        self._check_numbers(numbers)
        if not 0 <= 2 * count <= len(numbers):
            raise self._refused(
                f"was sent gradients of {self._tables()} that do not fit their {count} rows",
            )
        rows, counts, entries = Entries.of(part)
        self._check(rows)
        self._check_gradients(values, len(values))
        self._check_weights(entries, weights)
        self._check_lengths(entries, counts)
        if len(entries):
            low, high = (int(each) for each in torch.aminmax(entries))
            if low < 0 or high >= len(values):
                raise self._refused(
                    f"was sent gradients of {len(values)} bags of "
                    f"{self._tables()}, and entry {low if low < 0 else high} of these",
                )

    def _check_gradients(self, gradients: Tensor, count: int) -> None:
        shape = (count, self.stack.dim)
        if tuple(gradients.shape) != shape or gradients.dtype != self.stack.dtype:
            raise self._refused(
                f"was sent gradients {list(gradients.shape)} of "
                f"{gradients.dtype} for {self._tables()}; expected {list(shape)} of "
                f"{self.stack.dtype}",
            )

    def _tables(self) -> str:
        return ", ".join(map(repr, self._names()))

    def _names(self) -> list[str]:
        return list(dict.fromkeys(member.config.name for member in self.stack.members))

    def _refused(self, reason: str) -> InputError:
        """Returns the error of a message that does not fit this shard."""
        return InputError(f"server {self.name!r} {reason}", **self._named)

    @property
    def _named(self) -> dict[str, Any]:
        """The fields of an error: tables of the stack, and this server."""
        return {"table": ", ".join(self._names()), "server": self.name}


def _memory(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns memory for rows, in huge pages if the kernel has them.

    The rows of a step are all over it: with pages of 4 KiB, most of them are found by a walk
    through the page tables.
    """
    return memory.prefer_huge_pages(torch.empty(rows, columns, dtype=dtype, device="cpu"))
