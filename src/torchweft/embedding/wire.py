"""The form of values in messages: that of the table, or one of lower precision.

All forms round to the nearest value, ties to even; nothing is random. ``int8`` has one scale for
each row: the largest magnitude of the row, divided by 127.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from torchweft.embedding.errors import InputError
from torchweft.engine.codec.registry import rebuilds_plain
from torchweft.errors import ConfigurationError

Form = Literal["fp16", "bf16", "int8"]
FLOATS: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
_FORMS: Final = (None, *FLOATS, "int8")
_LARGEST: Final = 127
_SCALE: Final = torch.float32


@rebuilds_plain
@dataclass(frozen=True)
class Wire:
    """How rows and gradients travel; see ``Tables``.

    Args:
        pulled: The form of rows, and of sums of bags, that a trainer pulls: ``"fp16"``, ``"bf16"``
            or ``"int8"``; None for the type of the table.
        pushed: The same for gradients that a trainer pushes.

    Raises:
        ConfigurationError: There is no such form.
    """

    pulled: Form | None = None
    pushed: Form | None = None

    def __post_init__(self) -> None:
        for name in ("pulled", "pushed"):
            form = getattr(self, name)
            if form not in _FORMS:
                raise ConfigurationError(
                    f"{name}={form!r} is no form of values in messages; use one of "
                    f"{', '.join(map(repr, _FORMS))}"
                )


def row_bytes(form: Form | None, dim: int, dtype: torch.dtype) -> int:
    """Returns the size of a row of some columns in a message."""
    if form is None:
        return dim * dtype.itemsize
    return dim + _SCALE.itemsize if form == "int8" else dim * FLOATS[form].itemsize


def encode(values: Tensor, form: Form | None) -> Any:
    """Returns rows ``(n, dim)`` in the form of a message."""
    if form is None:
        return values
    if form == "int8":
        scales = (values.abs().amax(1, keepdim=True) / _LARGEST).to(_SCALE)
        # A row of zeros, or of values so small that their scale is zero, becomes zeros.
        divisors = torch.where(scales == 0, 1.0, scales).to(values.dtype)
        codes = (values / divisors).round_().clamp_(-_LARGEST, _LARGEST)
        return codes.nan_to_num_(0.0).to(torch.int8), scales
    dtype = FLOATS[form]
    bounds = torch.finfo(dtype)
    return torch.where(values.isfinite(), values.clamp(bounds.min, bounds.max), values).to(dtype)


def decode(
    payload: Any, form: Form | None, dtype: torch.dtype, server: str = "", table: str = ""
) -> Tensor:
    """Returns the rows of a message.

    Args:
        payload: The content of the message.
        form: Its form.
        dtype: The type of the table.
        server: The server that receives it, for messages.
        table: The tables that it is for.

    Raises:
        InputError: The payload has another form.
    """
    if form is None:
        found: Tensor = payload
        return found
    if form == "int8":
        if _is_int8(payload):
            codes, scales = payload
            rows: Tensor = codes.to(dtype) * scales.to(dtype)
            return rows
    elif isinstance(payload, Tensor) and payload.dtype == FLOATS[form] and payload.dim() == 2:
        return payload.to(dtype)
    described = payload.dtype if isinstance(payload, Tensor) else type(payload).__name__
    raise InputError(
        f"server {server!r} was sent values of {described} for {table}; its tables take "
        f"{form!r} in messages",
        server=server,
        table=table,
    )


def _is_int8(payload: Any) -> bool:
    if not isinstance(payload, (tuple, list)) or len(payload) != 2:
        return False
    codes, scales = payload
    return (
        all(isinstance(each, Tensor) for each in payload)
        and (codes.dtype, codes.dim()) == (torch.int8, 2)
        and (scales.dtype, tuple(scales.shape)) == (_SCALE, (codes.shape[0], 1))
    )
