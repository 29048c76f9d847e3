"""What a map consists of: its parts, and the values that all of them get."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from torchweft.mapreduce import trees


class Part(tuple[int, tuple[Any, ...], dict[str, Any]]):
    """One call of a map: the triple of a worker, and args and kwargs for it.

    Args:
        worker: Rank of the worker; a partitioner of the user may name it, too.
        args: Positional arguments.
        kwargs: Keyword arguments.
        weight: What the result counts in a mean: how many indices the part holds along the
            dimension that was cut.
    """

    weight: float

    def __new__(
        cls, worker: int | str, args: tuple[Any, ...], kwargs: dict[str, Any], weight: float = 1.0
    ) -> Part:
        """Makes the triple."""
        part = super().__new__(cls, (worker, args, kwargs))  # type: ignore[arg-type]
        part.weight = weight
        return part

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (*self, self.weight)


class Cut(NamedTuple):
    """What a partitioner made of the arguments of a map.

    Attributes:
        parts: The calls, in order; none where the arguments are empty.
        workers: Ranks of the workers to choose from; those of the parts are among them.
        is_any: Whether any of them may run any of the parts.
    """

    parts: list[Part]
    workers: tuple[int, ...]
    is_any: bool


class Broadcast:
    """The mark that ``broadcast`` puts on a value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"broadcast({type(self.value).__name__})"


def broadcast(value: Any) -> Any:
    """Marks an argument of a map that every part is to get whole.

    ``batch_partitioner`` and its kin cut every other tensor in the arguments. Modules, numbers and
    all else that is no tensor go to every part as they are, and need no mark. What is marked
    travels once to each worker, not once for each part.

    Args:
        value: A tensor, or a tree of them such as a state dict: an argument, or something in one.

    Returns:
        The mark, to be passed in place of ``value``. The function that is mapped sees ``value``; a
        function used as partitioner sees the mark, and may leave it in what it returns.
    """
    return Broadcast(bare(value))


def bare(tree: Any) -> Any:
    """Returns a tree without the marks of ``broadcast``; branches that have none as they are."""
    flat, spec = trees.flatten(tree, trees.whole_unless(Broadcast))
    return trees.unflatten(
        [leaf.value if isinstance(leaf, Broadcast) else leaf for leaf in flat], spec
    )


def unwrap(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a function without the marks of ``broadcast``."""
    return bare(args), bare(kwargs)


def kind_of(value: object) -> str:
    """Returns what a value is, for errors."""
    name = type(value).__name__
    kind = f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
    if isinstance(value, Tensor):
        return f"{kind} of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"{kind} of {len(value)}"
    return "None" if value is None else kind
