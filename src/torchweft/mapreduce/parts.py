"""The data of a map: its parts, and the values that all parts get."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from torchweft.mapreduce import trees


class Part(tuple[int, tuple[Any, ...], dict[str, Any]]):
    """One call of a map: the triple of a worker, and args and kwargs for it.

    Args:
        worker: Rank of the worker; a partitioner of the user may also give its name.
        args: Positional arguments.
        kwargs: Keyword arguments.
        weight: The weight of the result in a mean: how many indices the part holds along the
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
    """The result of a partitioner for the arguments of a map.

    Attributes:
        parts: The calls, in order; empty if the arguments are.
        workers: Ranks of the workers to choose from, including the workers of the parts.
        is_any: Whether any of these workers may run any of the parts.
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
    """Marks an argument of a map that every part gets whole.

    ``batch_partitioner`` and its variants cut all other tensors in the arguments. Modules, numbers
    and other non-tensors go to every part as they are, and need no mark. A marked value travels
    once to each worker, not once for each part.

    Args:
        value: A tensor, or a tree of tensors such as a state dict; an argument or a value in one.

    Returns:
        The mark, to be passed in place of ``value``. The mapped function sees ``value``. A
        function used as partitioner sees the mark, and may return triples that contain it.
    """
    return Broadcast(bare(value))


def bare(tree: Any) -> Any:
    """Returns a tree without the marks of ``broadcast``; branches without marks are not copied."""
    flat, spec = trees.flatten(tree, trees.whole_unless(Broadcast))
    return trees.unflatten(
        [leaf.value if isinstance(leaf, Broadcast) else leaf for leaf in flat], spec
    )


def unwrap(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a function without the marks of ``broadcast``."""
    return bare(args), bare(kwargs)


def kind_of(value: object) -> str:
    """Describes a value, for error messages."""
    name = type(value).__name__
    kind = f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
    if isinstance(value, Tensor):
        return f"{kind} of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"{kind} of {len(value)}"
    return "None" if value is None else kind
