"""References without workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torchweft.ids import ReferenceId
from torchweft.rpc import RRef


class NoKeeper:
    """Stands in for the keeper of references: nothing is counted."""

    agent = SimpleNamespace(peers={})

    def state_of(self, reference: ReferenceId) -> str:
        return ""

    def end_handle(self, reference: ReferenceId) -> None:
        pass


class Held(RRef[Any]):
    """A reference that holds its value itself."""

    __slots__ = ("value",)
    value: Any

    def local_value(self) -> Any:
        return self.value


def reference(owner: int, number: int, value: object = None) -> RRef[Any]:
    made: Any = Held.from_received(NoKeeper(), ReferenceId(0, owner, number))  # type: ignore[arg-type]
    made.value = value
    return made  # type: ignore[no-any-return]
