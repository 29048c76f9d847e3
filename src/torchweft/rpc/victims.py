"""Makes a launched program say in one line that it ends because another worker has ended.

The launcher reports how the other worker ended, whose own traceback is on the screen. Tracebacks
of all workers that waited for it would bury both.
"""

from __future__ import annotations

import sys
from types import TracebackType

from torchweft import knobs
from torchweft.agent import deaths
from torchweft.errors import ShutdownError, WorkerLost

_is_installed = False


def install() -> None:
    """Installs the exception hook, if a launcher of Weft has started this program. Idempotent."""
    global _is_installed
    if _is_installed or not deaths.own_facts() or knobs.TRACEBACKS.get() == "full":
        return
    _is_installed = True
    former = sys.excepthook

    def tell(
        error_type: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        loss = loss_in(error)
        if loss is None:
            former(error_type, error, trace)
        else:
            print(
                f"weft: this worker ends because of another one: {loss} "
                f"({knobs.TRACEBACKS.variable}=full shows where)",
                file=sys.stderr,
            )

    sys.excepthook = tell


def loss_in(error: BaseException | None) -> WorkerLost | ShutdownError | None:
    """Returns the loss of a worker that led to an error, if one did."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, WorkerLost) or (isinstance(error, ShutdownError) and error.missing):
            return error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None
