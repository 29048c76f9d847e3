"""The context manager that everything with a ``close`` is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NoReturn

from torchweft.errors import SerializationError

if TYPE_CHECKING:
    from typing_extensions import Self


class Closing(ABC):
    """A context manager that calls its ``close`` at the end of the block."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Ends it; nothing if it has ended."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            f"a {type(self).__name__} belongs to its process, and cannot be copied or sent; send "
            "rpc.RRef(...) of it, and call its methods there"
        )
