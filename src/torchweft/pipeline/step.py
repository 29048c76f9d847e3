"""One step of a synchronous pipeline at its driver: cuts the batch, has all workers run, waits.

No gradient goes back to the driver, so a tensor that requires grad is refused. And whether a
tensor with as many rows as the batch has one for each sample cannot be seen. But a mask or a table
is usually the same object in each step, while the samples change.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.weak import WeakIdKeyDictionary

from torchweft.errors import ConfigurationError, PipelineError, WorkerLost
from torchweft.extending import ignore_errors
from torchweft.pipeline.host import Host
from torchweft.pipeline.schedules import Table
from torchweft.pipeline.wiring import BATCH, Take, Wiring, describe, pick
from torchweft.rpc import Future, RRef, as_completed, on

END_S = 5.0
"""How long the end of a step, or of a pipeline, may take on a worker."""

# Batches


class _Whole:
    """Marks a value of a batch that is not cut."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"broadcast({describe(self.value)})"


def broadcast(value: Any) -> Any:
    """Marks a value in a batch or target that each micro-batch gets whole.

    A tensor that is not per sample, such as a mask or weights of classes, needs the mark: all other
    tensors are cut along dimension 0, also one that has as many rows as the batch by chance. A step
    warns once if such a tensor is the same in two steps. Stages must not change it in place.

    Args:
        value: A tensor, or a tuple, list or dict of tensors.

    Returns:
        The mark, to be passed in place of ``value``. Stages and the loss function see ``value``.
    """
    return _Whole(value)


def _unmarked(leaf: Any) -> Any:
    """Returns a leaf of a batch without its mark of ``broadcast``, if it has one."""
    return leaf.value if isinstance(leaf, _Whole) else leaf


def uncut(batch: Any) -> Any:
    """Returns a batch without marks of ``broadcast``."""
    leaves, structure = _pytree.tree_flatten(batch)
    if not any(isinstance(leaf, _Whole) for leaf in leaves):
        return batch
    return _pytree.tree_unflatten([*map(_unmarked, leaves)], structure)


def cut_batch(batch: Any, count: int, name: str = "the batch") -> list[Any]:
    """Cuts each tensor of a batch into ``count`` equal parts along dimension 0.

    Objects that are no tensors, tensors without dimensions, and values that are marked by
    ``broadcast`` go to all parts.

    Raises:
        ConfigurationError: A tensor cannot be cut evenly, or two tensors differ in size.
    """
    leaves, structure = _pytree.tree_flatten(batch)
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"the tensors of {name} have {sorted(sizes)} rows; all need the same number. Mark one "
            "that is not per sample: torchweft.pipeline.broadcast(tensor)"
        )
    for size in sizes:
        if size % count or not size:
            raise ConfigurationError(
                f"{name} has {size} rows, which cannot be cut into {count} equal micro-batches; "
                f"pass a multiple of {count} rows, or choose another number of micro-batches"
            )
    columns = [
        torch.tensor_split(leaf, count)
        if isinstance(leaf, Tensor) and leaf.dim()
        else (_unmarked(leaf),) * count
        for leaf in leaves
    ]
    return [
        _pytree.tree_unflatten([column[number] for column in columns], structure)
        for number in range(count)
    ]


def joined(outputs: Sequence[Any]) -> Any:
    """Returns the outputs of all micro-batches as one, joined along dimension 0."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else torch.stack(list(outputs))
    if isinstance(first, dict):
        return {key: joined([each[key] for each in outputs]) for key in first}
    if isinstance(first, (tuple, list)):
        columns = [joined(column) for column in zip(*outputs, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    return list(outputs)


# Checks


def check_untrained(batch: Any, name: str) -> None:
    """Looks at one batch or target.

    Args:
        batch: The batch.
        name: What it is, in messages.

    Raises:
        ConfigurationError: A tensor requires grad, or belongs to a module.
    """
    for path, leaf in _pytree.tree_flatten_with_path(batch)[0]:
        value = _unmarked(leaf)
        if isinstance(value, Tensor) and value.requires_grad:
            raise ConfigurationError(
                f"{name}{_pytree.keystr(path)} requires grad, and no gradient comes back from the "
                "stages: pass tensor.detach(), or make what computes it a part of the first stage"
            )
        if isinstance(leaf, nn.Buffer):
            raise ConfigurationError(
                f"{name}{_pytree.keystr(path)} is a buffer of a module: make the module a part of "
                "the stage that uses it, or pass torchweft.pipeline.broadcast(buffer)"
            )


class RepeatedTensors:
    """Notices a tensor of a batch, or of a target, that was the same in the step before.

    Args:
        name: What it looks at, in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._earlier: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        self._has_warned = False

    def warn_once(self, batch: Any) -> None:
        """Warns once of a tensor that was the same in the step before, beside one that was not."""
        if self._has_warned:
            return
        tensors = {
            _pytree.keystr(path): leaf
            for path, leaf in _pytree.tree_flatten_with_path(batch)[0]
            if isinstance(leaf, Tensor) and leaf.dim()
        }
        earlier = self._earlier
        self._earlier = {path: (weakref.ref(each), each._version) for path, each in tensors.items()}
        same = [path for path, each in tensors.items() if _is_same(earlier.get(path), each)]
        if not same or len(same) == len(tensors) or earlier.keys() != tensors.keys():
            return
        self._has_warned = True
        path = same[0]
        warnings.warn(
            f"{self._name}{path}, {describe(tensors[path])}, is the same tensor as in the step "
            "before, and was cut into micro-batches like the others. If its rows are not those of "
            "samples, mark it: torchweft.pipeline.broadcast(tensor). If they are, pass a copy",
            RuntimeWarning,
            stacklevel=3,  # Outside of Pipe.step.
        )


def _is_same(earlier: tuple[weakref.ref[Tensor], int] | None, tensor: Tensor) -> bool:
    if earlier is None:
        return False
    known, version = earlier
    return known() is tensor and version == tensor._version


class PassedWeights:
    """The weights of the modules that the program has passed; the workers train copies of them."""

    def __init__(self) -> None:
        self._requires_grad = WeakIdKeyDictionary()

    def add(self, weights: Iterable[Tensor]) -> None:
        """Adds weights."""
        self._requires_grad.update({each: each.requires_grad for each in weights})

    def warn_of_changes(self) -> None:
        """Warns once if the program has frozen some of them, or has some train again."""
        known = self._requires_grad.items()  # type: ignore[no-untyped-call]
        changed = [each for each, before in known if each.requires_grad != before]
        if changed:
            self.add(changed)
            warnings.warn(
                f"requires_grad of {len(changed)} parameters has changed here, and not where they "
                "are trained; call pipe.repartition(model) to have the stages follow",
                RuntimeWarning,
                stacklevel=4,
            )


class Dropping:
    """Whether the gradients are to be dropped before they are used again, and how."""

    def __init__(self) -> None:
        self._set_to_none: bool | None = None

    def want(self, set_to_none: bool | None) -> None:
        """Has them dropped; a gradient that is None does not become zeros."""
        if set_to_none is not None and not self._set_to_none:
            self._set_to_none = set_to_none

    def take(self) -> bool | None:
        """Returns whether they become None, or zeros; None: they stay. Then it has been done."""
        found, self._set_to_none = self._set_to_none, None
        return found


# The calls of a step


class StepDriver:
    """Has the workers of a pipeline run their rows. Not thread-safe.

    Args:
        hosts: The hosts of the workers, by row; empty once the pipeline is closed.
        table: The rows.
        wiring: The values between the stages.

    Attributes:
        number: Number of the last step or run.
    """

    def __init__(self, hosts: Sequence[RRef[Host]], table: Table, wiring: Wiring) -> None:
        self.number = 0
        self._hosts = hosts
        self._last = table.n_stages - 1
        self._seats = table.seats
        self._takes: list[list[tuple[int, int, tuple[Take, ...]]]] = [[] for _ in table.rows]
        for (stage, microbatch), row in self._seats.items():
            takes = wiring.taken(stage, BATCH)
            if takes:
                self._takes[row].append((stage, microbatch, takes))

    def open_hosts(self) -> Sequence[RRef[Host]]:
        """Returns the hosts.

        Raises:
            ConfigurationError: The pipeline was closed.
        """
        if not self._hosts:
            raise ConfigurationError("the pipeline cannot be used any more: it was closed")
        return self._hosts

    def run(
        self,
        is_training: bool,
        zero_grad: bool | None,
        batches: Sequence[Any],
        targets: Sequence[Any],
    ) -> list[Any]:
        """Runs all rows once; returns the results of the workers that have one. Blocks.

        Args:
            is_training: Whether to run backwards as well.
            zero_grad: Whether gradients become None first, or zeros; None: they stay.
            batches: The micro-batches.
            targets: Their targets, for training.
        """
        hosts = self.open_hosts()
        self.number += 1
        futures: list[Future[Any]] = []
        failures: list[Exception] = []
        try:
            for row, host in enumerate(hosts):
                given = self._inputs(row, batches), self._own_targets(row, targets)
                start = host.rpc_async(0).start
                futures.append(start(self.number, is_training, zero_grad, *given))
        except Exception as error:
            failures.append(error)
            self._end()
        return [result for result in self._results(futures, failures) if result is not None]

    def _inputs(self, row: int, batches: Sequence[Any]) -> dict[int, dict[int, list[Any]]]:
        """Returns what the stages of a worker take of the batch, by stage and micro-batch."""
        inputs: dict[int, dict[int, list[Any]]] = {}
        for stage, number, takes in self._takes[row]:
            batch = batches[number]
            picked = [batch if take.key is None else pick(batch, take, stage) for take in takes]
            inputs.setdefault(stage, {})[number] = picked
        return inputs

    def _own_targets(self, row: int, targets: Sequence[Any]) -> dict[int, Any]:
        seats, last = self._seats, self._last
        return {at: target for at, target in enumerate(targets) if seats[last, at] == row}

    def _results(self, futures: Sequence[Future[Any]], failures: list[Exception]) -> list[Any]:
        """Waits for all workers; if one fails, ends the step on the others and raises its error."""
        try:
            for future in as_completed(futures):
                try:
                    future.wait()
                except Exception as error:
                    if not failures:
                        self._end()
                    failures.append(error)
        except BaseException:  # Ctrl-C
            self._end()
            cancel(futures)
            raise
        if failures:
            # The others failed because of the first, unless it was told to end by one of them.
            raise min(failures, key=blame)
        return [future.wait() for future in futures]

    def _end(self) -> None:
        """Ends the step on all workers; does not wait for that."""
        for host in self._hosts:
            with contextlib.suppress(WorkerLost):
                ignore_errors(on(host, END_S).rpc_async(Host.abort, self.number))


def blame(error: Exception) -> int:
    """Orders the errors of a step: the one that explains the others first."""
    if isinstance(error, WorkerLost):
        return 0
    return 1 if not isinstance(error, PipelineError) or error.stage >= 0 else 2


def cancel(futures: Iterable[Future[Any]]) -> None:
    """Gives up calls, so that their later errors are not reported as never looked at."""
    for future in futures:
        future.cancel()
