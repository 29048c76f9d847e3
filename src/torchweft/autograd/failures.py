"""Names the operation of a backward pass that raised an error."""

from __future__ import annotations

from types import TracebackType

import torch

from torchweft.errors import WeftError

NATIVE = "an operation of torch"
EXCHANGE = "exchanging gradients"


def operation_of(error: BaseException) -> str:
    """Returns the name of the user's function whose backward raised ``error``.

    torch does not report which of its own operations failed; its message usually does.
    """
    name = EXCHANGE if isinstance(error, WeftError) else NATIVE
    step: TracebackType | None = error.__traceback__
    while step is not None:
        for value in list(step.tb_frame.f_locals.values()):
            if isinstance(value, torch._C._FunctionBase):
                name = type(value).__name__.removesuffix("Backward") + ".backward"
        step = step.tb_next
    return name
