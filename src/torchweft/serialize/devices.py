"""Numbers the devices, for the table of tensors, and finds them at the receiver."""

from __future__ import annotations

import torch

from torchweft.errors import ProtocolError, SerializationError

# The position goes over the wire: only ever append.
_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "npu", "mlu", "privateuseone")
_CODES = {kind: code for code, kind in enumerate(_TYPES)}
_NO_INDEX = 255

HOST = (0, _NO_INDEX)
"""The code of the CPU."""


def device_code(device: torch.device) -> tuple[int, int]:
    """Returns two numbers below 256 for a device."""
    code = _CODES.get(device.type)
    if code is None:
        raise SerializationError(
            f"tensors on device {device} cannot be sent; send tensor.cpu() instead"
        )
    return code, _NO_INDEX if device.index is None or code == 0 else device.index


def device_of(code: tuple[int, int], index: int, worker: str) -> torch.device | None:
    """Returns the device for a code that came from another worker, None for the CPU.

    Args:
        code: The numbers that ``device_code`` returned at the sender.
        index: Position of the tensor in its message, for the error message.
        worker: Name of this worker, for the error message.

    Raises:
        ProtocolError: No version of Weft uses that number.
        SerializationError: This worker has no such device.
    """
    if code[0] == 0:
        return None
    if code[0] >= len(_TYPES):
        raise ProtocolError(f"the tensor table names the unknown device type {code[0]}")
    kind = _TYPES[code[0]]
    position = None if code[1] == _NO_INDEX else code[1]
    count = _device_count(kind)
    if (position or 0) < count:
        return torch.device(kind) if position is None else torch.device(kind, position)
    device = kind if position is None else f"{kind}:{position}"
    here = f"worker {worker!r}" if worker else "this worker"
    raise SerializationError(
        f"tensor {index} of the message belongs on device {device}, but {here} has "
        f"{_names(kind, count)}; send tensor.cpu(), or map the device to one that {here} has "
        "(device_maps)",
        worker=worker,
    )


def _device_count(kind: str) -> int:
    try:
        return int(torch.get_device_module(kind).device_count())
    except (AttributeError, RuntimeError):
        return 0  # this torch was built without that kind of device


def _names(kind: str, count: int) -> str:
    if not count:
        return f"no {kind} device"
    return "only " + ", ".join(f"{kind}:{index}" for index in range(count))
