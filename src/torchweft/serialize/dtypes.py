"""Numbers of dtypes and devices in messages: positions in lists to which names are only appended.

A dtype that the installed torch lacks keeps its number, so that workers with different versions
agree.
"""

from __future__ import annotations

import torch

from torchweft.errors import ProtocolError, SerializationError
from torchweft.native import native

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
_DTYPE_NAMES = tuple(f"{_BY_2_13} {_BY_2_15}".split())

_DTYPES: tuple[torch.dtype | None, ...] = tuple(getattr(torch, name, None) for name in _DTYPE_NAMES)

CODES: dict[torch.dtype, int] = {
    dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None
}
"""Every dtype whose memory can travel as it is; quantised tensors are taken apart before."""

NUMPY_DTYPES = frozenset(getattr(torch, name) for name in f"{_STANDARD} {_UNSIGNED}".split())
"""The dtypes whose memory numpy can show directly as plain bytes."""


def dtype_of(code: int) -> torch.dtype:
    """Returns the dtype with the number ``code``.

    Raises:
        ProtocolError: No version of Weft uses that number.
        SerializationError: The torch installed here has no such dtype.
    """
    if code >= len(_DTYPE_NAMES):
        raise ProtocolError(f"a tensor has the unknown dtype {code}")
    dtype = _DTYPES[code]
    if dtype is None:
        raise SerializationError(
            f"a tensor has dtype torch.{_DTYPE_NAMES[code]}, which torch {torch.__version__} of "
            "this worker does not have; install the same torch on all workers, or convert the "
            "tensor before sending it"
        )
    return dtype


_DLPACK_KINDS = {
    0: "int8 int16 int32 int64",
    1: "uint8 uint16 uint32 uint64",
    2: "float16 float32 float64",
    4: "bfloat16",
    5: "complex64 complex128",
    6: "bool",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
}
"""The dtypes that the native twin handles, by the numbers of their kinds in DLPack."""


def is_differentiable(dtype: torch.dtype) -> bool:
    """Tells whether tensors of a dtype can require grad."""
    return dtype.is_floating_point or dtype.is_complex


if native is not None:
    for _kind, _names in _DLPACK_KINDS.items():
        for _dtype in [getattr(torch, _name, None) for _name in _names.split()]:
            if _dtype is not None:
                _bits = 8 * _dtype.itemsize
                native.set_dtype(_dtype, CODES[_dtype], _kind, _bits, is_differentiable(_dtype))


_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "npu", "mlu", "privateuseone")
_DEVICE_CODES = {kind: code for code, kind in enumerate(_DEVICE_TYPES)}
_NO_INDEX = 255

HOST = _NO_INDEX
"""The number of the CPU."""


def device_code(device: torch.device) -> int:
    """Returns the number of a device: its type, and its index in the lowest byte."""
    code = _DEVICE_CODES.get(device.type)
    if code is None:
        raise SerializationError(
            f"tensors on device {device} cannot be sent; send tensor.cpu() instead"
        )
    return code << 8 | (_NO_INDEX if device.index is None or code == 0 else device.index)


def device_of(code: int, index: int, worker: str) -> torch.device | None:
    """Returns the device for a code that came from another worker, None for the CPU.

    Args:
        code: The number that ``device_code`` returned at the sender.
        index: Position of the tensor in its message, for the error message.
        worker: Name of this worker, for the error message.

    Raises:
        ProtocolError: No version of Weft uses that number.
        SerializationError: This worker has no such device.
    """
    type_code, position = divmod(code, 256)
    if type_code == 0:
        return None
    if type_code >= len(_DEVICE_TYPES):
        raise ProtocolError(f"a tensor belongs on a device of the unknown type {type_code}")
    kind = _DEVICE_TYPES[type_code]
    device = kind if position == _NO_INDEX else f"{kind}:{position}"
    count = _device_count(kind)
    if (0 if position == _NO_INDEX else position) < count:
        return torch.device(device)
    here = f"worker {worker!r}" if worker else "this worker"
    raise SerializationError(
        f"tensor {index} of the message belongs on device {device}, but {here} has "
        f"{_listed(kind, count)}; send tensor.cpu(), or map the device to one that {here} has "
        "(device_maps)",
        worker=worker,
    )


def _device_count(kind: str) -> int:
    try:
        return int(torch.get_device_module(kind).device_count())
    except (AttributeError, RuntimeError):
        return 0  # this torch was built without that kind of device


def _listed(kind: str, count: int) -> str:
    if not count:
        return f"no {kind} device"
    return "only " + ", ".join(f"{kind}:{index}" for index in range(count))
