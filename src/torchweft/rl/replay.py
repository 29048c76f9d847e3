"""A replay buffer: rows of past steps, sampled uniformly or by priority.

Put it on a worker of its own with ``rpc.remote(worker, ReplayBuffer, (capacity,))``. Rows have
serial numbers. A priority for a row that has been overwritten meanwhile is ignored, so a learner
and observers may be of any speed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchweft.arguments import checked_int, wrong_type
from torchweft.errors import ConfigurationError
from torchweft.extending import rebuilds_plain
from torchweft.rl.errors import BadPriority, ColumnsMismatch, NotEnough, ReplayError
from torchweft.rpc import expose


class SumTree:
    """Weights of places, sampled in logarithmic time; many places at a time. Not thread-safe.

    A node is the sum of its two children, computed anew when one changes: errors do not add up.

    Args:
        capacity: How many places there are; all weigh 0.
    """

    def __init__(self, capacity: int) -> None:
        self._depth = max(capacity - 1, 0).bit_length()
        self._first = 1 << self._depth
        self._sums = np.zeros(2 * self._first)
        self._capacity = capacity

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._sums[1])

    def get(self, places: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the weights of places."""
        weights: NDArray[np.float64] = self._sums[self._first + places]
        return weights

    def set(self, places: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Changes the weights of places, 0 or more; of a place named twice, the last one counts."""
        nodes = self._first + places
        self._sums[nodes] = weights
        for _ in range(self._depth):
            nodes = nodes >> 1
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]

    def find(self, parts: NDArray[np.float64]) -> NDArray[np.int64]:
        """Returns the place at each part, in [0, 1), of the total; its weight is above 0."""
        left_over = parts * self._sums[1]
        nodes = np.ones(len(parts), np.int64)
        for _ in range(self._depth):
            left = self._sums[2 * nodes]
            # Rounding may lead beyond the last weight: never into a sum of 0.
            is_right = (left_over >= left) & (self._sums[2 * nodes + 1] > 0)
            left_over = np.where(is_right, left_over - left, left_over)
            nodes = 2 * nodes + is_right
        return nodes - self._first


@rebuilds_plain
class Sample(NamedTuple):
    """Rows of a buffer.

    Attributes:
        columns: By name, ``(count, ...)``; copies.
        rows: Serial numbers of the rows, int64 ``(count,)``, for ``set_priorities``.
        weights: Weights that make up for unequal probabilities, float32 ``(count,)``; the largest
            is 1. All are 1 in a uniform buffer.
    """

    columns: dict[str, Tensor]
    rows: Tensor
    weights: Tensor


class ReplayBuffer:
    """Keeps the newest rows, and samples them with replacement. Thread-safe.

    Args:
        capacity: How many rows are kept; then the oldest are overwritten.
        priority_power: 0 for uniform sampling; otherwise rows are sampled in proportion to this
            power of their priorities (Schaul et al., "Prioritized experience replay", 2016). New
            rows have the highest priority so far.
        weight_power: How far ``Sample.weights`` make up for it, from 0 (not) to 1 (wholly).
        seed: Seed of the sampling.

    Raises:
        ConfigurationError: A number is out of range.
    """

    def __init__(
        self,
        capacity: int,
        *,
        priority_power: float = 0.0,
        weight_power: float = 0.4,
        seed: int = 0,
    ) -> None:
        checked_int("capacity", capacity)
        if capacity < 1 or not 0 <= priority_power < np.inf or not 0 <= weight_power <= 1:
            raise ConfigurationError(
                f"capacity={capacity}, priority_power={priority_power}, "
                f"weight_power={weight_power}: pass 1 or more, 0 or more, and 0 to 1"
            )
        self._capacity = capacity
        self._priority_power = priority_power
        self._weight_power = weight_power
        self._columns: dict[str, Tensor] = {}
        self._added = 0
        self._highest = 1.0
        self._tree = SumTree(capacity) if priority_power else None
        self._generator = np.random.default_rng(seed)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return min(self._added, self._capacity)

    @expose
    def size(self) -> int:
        """Returns how many rows are stored; for calls from other workers."""
        return len(self)

    @expose
    def add(self, columns: Mapping[str, Tensor]) -> int:
        """Adds rows; returns how many there have been in all. They are copied.

        Args:
            columns: By name, ``(rows, ...)``, as ``Trajectory.transitions`` returns them.

        Raises:
            ColumnsMismatch: Columns, dtypes or shapes differ from those of the first call, or
                columns have unequally many rows. Nothing is added.
            ArgumentTypeError: A column is no tensor.
        """
        with self._lock:
            count = self._checked(columns)
            kept = min(count, self._capacity)
            first = (self._added + count - kept) % self._capacity
            before_wrap = min(kept, self._capacity - first)
            for name, column in columns.items():
                if name not in self._columns:
                    self._columns[name] = self._empty(column)
                stored = self._columns[name]
                # Slices: torch cannot write rows by their numbers for all types, such as uint16.
                newest = column[count - kept :].detach()
                stored[first : first + before_wrap] = newest[:before_wrap]
                stored[: kept - before_wrap] = newest[before_wrap:]
            if self._tree is not None and kept:
                places = np.arange(first, first + kept) % self._capacity
                self._tree.set(places, np.full(kept, self._highest**self._priority_power))
            self._added += count
            return self._added

    def _empty(self, column: Tensor) -> Tensor:
        """Returns memory for rows like those of a column; to be written in any mode of PyTorch."""
        with torch.inference_mode(mode=False):
            return column.new_empty((self._capacity, *column.shape[1:]), requires_grad=False)

    def _checked(self, columns: Mapping[str, Tensor]) -> int:
        if not isinstance(columns, Mapping):
            raise wrong_type("columns", columns, "pass a dict of tensors by name")
        if not columns or (self._columns and columns.keys() != self._columns.keys()):
            differing = sorted(columns.keys() ^ self._columns.keys())
            raise ColumnsMismatch(
                f"rows have the columns {sorted(columns)}, the buffer has {sorted(self._columns)}",
                column=differing[0] if differing else "",
            )
        for name, column in columns.items():
            if not isinstance(column, Tensor):
                raise wrong_type(f"column {name!r}", column, "pass a tensor of shape (rows, ...)")
            if not column.ndim:
                raise ColumnsMismatch(
                    f"column {name!r} is a tensor without dimensions, and so has no rows",
                    column=name,
                )
        count = len(next(iter(columns.values())))
        for name, column in columns.items():
            stored = self._columns.get(name, column)
            expected, found = _kind(stored), _kind(column)
            if expected != found or len(column) != count:
                raise ColumnsMismatch(
                    f"column {name!r} has {len(column)} rows of {found}; expected {count} rows of "
                    f"{expected}",
                    column=name,
                    expected=expected,
                    found=found,
                )
        return count

    @expose
    def sample(self, count: int, at_least: int = 1) -> Sample:
        """Draws rows, with replacement.

        Args:
            count: How many.
            at_least: How many rows must be stored.

        Raises:
            NotEnough: Fewer are stored, or all priorities are 0.
        """
        if checked_int("count", count) < 0:
            raise ConfigurationError(f"count={count}: pass 0 or more")
        with self._lock:
            stored = len(self)
            has_weight = self._tree is None or self._tree.total > 0
            if stored < max(at_least, 1) or not has_weight:
                zeros = "" if has_weight or not stored else ", all with priority 0"
                raise NotEnough(
                    f"{stored} rows are stored{zeros}; "
                    f"{max(at_least, 1)} must be there before any are drawn",
                    stored=stored,
                    wanted=max(at_least, 1),
                )
            weights = np.ones(count, np.float32)
            if self._tree is None:
                places = self._generator.integers(stored, size=count)
            else:
                # One draw from each of `count` equal parts: less variance than free draws.
                parts = (np.arange(count) + self._generator.random(count)) / count
                places = self._tree.find(parts)
                shares = stored * self._tree.get(places) / self._tree.total
                relative = shares**-self._weight_power
                weights = (relative / relative.max(initial=0.0)).astype(np.float32)
            index = torch.from_numpy(places)
            columns = {name: column[index] for name, column in self._columns.items()}
            return Sample(
                columns, torch.from_numpy(self._serials(places)), torch.from_numpy(weights)
            )

    def _serials(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the serial numbers of the rows that are in places now."""
        newest = self._added - 1
        serials: NDArray[np.int64] = newest - (newest - places) % self._capacity
        return serials

    @expose
    def set_priorities(self, rows: Tensor, priorities: Tensor) -> int:
        """Changes the priorities of rows; those that were overwritten meanwhile are left out.

        Args:
            rows: Serial numbers, as in ``Sample.rows``.
            priorities: One for each, such as absolute errors; 0 or more.

        Returns:
            How many rows were left out.

        Raises:
            ConfigurationError: The buffer samples uniformly.
            BadPriority: A priority is negative or not finite, or its power is not; or there is not
                one for each row.
            ArgumentTypeError: ``rows`` or ``priorities`` is no tensor, or ``rows`` not of integers.
        """
        if self._tree is None:
            raise ConfigurationError(
                "this buffer samples uniformly; make it with a priority_power above 0"
            )
        for name, given in (("rows", rows), ("priorities", priorities)):
            if not isinstance(given, Tensor):
                raise wrong_type(name, given, "pass a tensor of shape (rows,)")
        values = priorities.detach().cpu().double().numpy()
        if rows.ndim != 1 or values.shape != tuple(rows.shape):
            raise BadPriority(
                f"rows of shape {list(rows.shape)} and priorities of shape {list(values.shape)}: "
                "pass a priority for each row, both of shape (rows,)",
                position=min(rows.numel(), values.size),
            )
        if rows.dtype.is_floating_point or rows.dtype.is_complex or rows.dtype == torch.bool:
            raise wrong_type("rows", rows, f"pass the integers of Sample.rows, not {rows.dtype}")
        with np.errstate(over="ignore", invalid="ignore"):
            weights = values**self._priority_power
        bad = np.flatnonzero(~(np.isfinite(weights) & (values >= 0)))
        if bad.size:
            raise BadPriority(
                f"priority {values[bad[0]]} at position {bad[0]} must be finite, also to the power "
                f"{self._priority_power}, and 0 or more",
                position=int(bad[0]),
            )
        with self._lock:
            serials = rows.cpu().numpy()
            is_there = (serials >= self._added - len(self)) & (serials < self._added)
            self._highest = max(self._highest, float(values[is_there].max(initial=0.0)))
            self._tree.set(serials[is_there] % self._capacity, weights[is_there])
            return int((~is_there).sum())

    def state_dict(self) -> dict[str, Any]:
        """Returns all rows, priorities and the state of the sampling, for a snapshot."""
        with self._lock:
            weights = np.empty(0)
            if self._tree is not None:
                weights = self._tree.get(np.arange(len(self)))
            return {
                "columns": {
                    name: each[: len(self)].clone() for name, each in self._columns.items()
                },
                "added": self._added,
                "highest": self._highest,
                "weights": torch.from_numpy(weights),
                "generator": self._generator.bit_generator.state,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the state of a snapshot of a buffer of the same capacity and kind of sampling.

        Raises:
            ReplayError: The state is of another buffer; nothing has changed.
        """
        columns, added = state["columns"], state["added"]
        stored = len(next(iter(columns.values()))) if columns else 0
        if stored != min(added, self._capacity):
            raise ReplayError(
                f"a snapshot with {stored} of {added} rows is of a buffer of another capacity than "
                f"{self._capacity}; make a buffer of the same capacity, or add the rows one after "
                "the other"
            )
        if stored and bool(len(state["weights"])) != (self._tree is not None):
            kinds = ["by priority", "uniformly"]
            had, has = kinds if self._tree is None else kinds[::-1]
            raise ReplayError(
                f"the snapshot is of a buffer that samples {had}, and this one samples {has}; make "
                "it with the priority_power of the former"
            )
        with self._lock:
            self._added, self._highest = state["added"], state["highest"]
            self._columns = {}
            for name, column in state["columns"].items():
                self._columns[name] = self._empty(column)
                self._columns[name][: len(column)] = column
            if self._tree is not None:
                weights = torch.as_tensor(state["weights"], dtype=torch.float64).cpu().numpy()
                self._tree = SumTree(self._capacity)
                self._tree.set(np.arange(len(weights)), weights)
            self._generator.bit_generator.state = state["generator"]


def _kind(column: Tensor) -> str:
    return f"{str(column.dtype)[6:]}{list(column.shape[1:])}"
