"""Numbers the dtypes, for the table of tensors.

The position in the list goes over the wire: only ever append. A dtype that the installed torch
lacks keeps its number, so that workers with different versions agree about all others.
"""

from __future__ import annotations

import torch

from torchweft.errors import ProtocolError, SerializationError

_STANDARD = "bool uint8 int8 int16 int32 int64 float16 float32 float64"
_UNSIGNED = "uint16 uint32 uint64"
_COMPLEX = "complex32 complex64 complex128"
_FLOAT8 = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
_BITS = "bits8 bits16 bits1x8 bits2x4 bits4x2"
_SMALL = "uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7"
_BY_2_13 = (
    f"{_STANDARD} {_UNSIGNED} {_COMPLEX} bfloat16 {_FLOAT8} float4_e2m1fn_x2 {_BITS} {_SMALL}"
)
_BY_2_15 = "bcomplex32"
_NAMES = tuple(f"{_BY_2_13} {_BY_2_15}".split())

_BY_CODE: tuple[torch.dtype | None, ...] = tuple(getattr(torch, name, None) for name in _NAMES)

CODES: dict[torch.dtype, int] = {
    dtype: code for code, dtype in enumerate(_BY_CODE) if dtype is not None
}
"""Every dtype whose memory can travel as it is; quantised tensors are taken apart before."""

NUMPY_DTYPES = frozenset(getattr(torch, name) for name in f"{_STANDARD} {_UNSIGNED}".split())
"""The dtypes whose memory numpy can show directly as plain bytes."""

REAL_CODES: dict[torch.dtype, int] = {
    dtype: code for dtype, code in CODES.items() if not dtype.is_complex
}
"""The dtypes that have no lazy conjugate."""


def dtype_of(code: int) -> torch.dtype:
    """Returns the dtype with the number ``code``.

    Raises:
        ProtocolError: No version of Weft uses that number.
        SerializationError: The torch installed here has no such dtype.
    """
    if code >= len(_NAMES):
        raise ProtocolError(f"the tensor table names the unknown dtype {code}")
    dtype = _BY_CODE[code]
    if dtype is None:
        raise SerializationError(
            f"a tensor has dtype torch.{_NAMES[code]}, which torch {torch.__version__} of this "
            "worker does not have; install the same torch on all workers, or convert the tensor "
            "before sending it"
        )
    return dtype
