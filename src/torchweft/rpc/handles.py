"""Counted handles: one worker's uses of values that live on some worker.

``torchweft.rpc.RRef`` adds the calls that a program makes with a handle. Messages need only this
part: they hand handles on, and make new handles of references that arrive.
"""

from __future__ import annotations

import sys
from typing import TypeVar

from torch.autograd.profiler import record_function

from torchweft.engine.codec.objects import register_external
from torchweft.engine.codec.registry import has_callable_methods
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.current import current, is_forked
from torchweft.engine.worker.references import ReferenceKeeper
from torchweft.errors import NotInitialized, ReferenceGone
from torchweft.ids import ReferenceId, WorkerInfo

H = TypeVar("H", bound="Handle")
_WEFT = __name__.partition(".")[0] + "."


@has_callable_methods
class Handle:
    """A use of a value, counted from its beginning until the handle is dropped."""

    __slots__ = ("__weakref__", "_keeper", "id", "value_type")

    id: ReferenceId
    value_type: type
    """The class of the value; set only if ``remote`` was called with that class."""
    _keeper: ReferenceKeeper

    @classmethod
    def from_received(cls: type[H], keeper: ReferenceKeeper, reference: ReferenceId) -> H:
        """Wraps a reference for which ``keeper`` has counted a handle."""
        handle = cls.__new__(cls)
        handle._bind(keeper, reference, is_new=False)
        return handle

    @classmethod
    def from_created(
        cls: type[H], keeper: ReferenceKeeper, reference: ReferenceId, maker: str = ""
    ) -> H:
        """Wraps a new reference to the result of the function ``maker``."""
        handle = cls.__new__(cls)
        handle._bind(keeper, reference, is_new=True, maker=maker)
        return handle

    def _bind(
        self, keeper: ReferenceKeeper, reference: ReferenceId, *, is_new: bool, maker: str = ""
    ) -> None:
        self.id = reference
        self._keeper = keeper
        if is_new:
            # The program's own frame, not that of Weft code which it called.
            frame = sys._getframe(2)
            while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
                _WEFT
            ):
                frame = frame.f_back
            keeper.note_site(reference, (frame.f_code, frame.f_lineno, maker))

    def __del__(self) -> None:
        try:
            self._keeper.end_handle(self.id)
        except AttributeError:
            pass  # Never bound: the constructor raised.

    def agent(self) -> Agent:
        """Returns the current agent, if the reference is of its group.

        Raises:
            NotInitialized: This process is no longer a worker.
            ReferenceGone: The reference is of a former group; its number may name another value.
        """
        try:
            agent = current()
        except NotInitialized:
            if is_forked():
                raise
            raise NotInitialized(
                "the group of this reference has been shut down, and the value is gone with it; "
                "fetch what is still needed by to_here() before the shutdown"
            ) from None
        if agent is not self._keeper.agent:
            raise ReferenceGone("this reference belongs to a group that has been shut down")
        return agent

    def end_event(self, event: record_function) -> None:
        """Ends the profiler's event of the call that makes the value."""
        event.__exit__(None, None, None)

    check_travels = agent
    """Called before the reference is handed on; a subclass may refuse that by raising."""

    def owner(self) -> WorkerInfo:
        """Returns the worker that owns the value."""
        return self.agent().peers[self.id.owner].info

    def owner_name(self) -> str:
        """Returns the name of the worker that owns the value."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Whether this worker owns the value."""
        return self.id.owner == self.agent().me.id

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to count this worker as a user of the value."""
        return self._keeper.is_confirmed(self.id)


register_external(Handle)
