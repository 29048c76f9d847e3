"""Device maps between this worker and one other: the device on which a sent tensor arrives.

Calls follow the caller's map for the callee. Answers follow its inverse, so the callee must know
the map of the caller; workers register their maps. Gradients go against the direction of the
message whose tensors they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from torchweft.errors import SerializationError
from torchweft.protocol.registration import Registration

DeviceMap = Mapping[torch.device, torch.device]
Place = Callable[[torch.device], torch.device]
"""Returns the receiver's device for the device of a tensor at its sender."""

HOST = torch.device("cpu")
_UNMAPPED = ("cpu", "meta")
"""Types of devices that need no entry in a map. (Tensors on ``meta`` stay in their process.)"""


class DeviceMaps:
    """The maps between this worker and one other worker, or this worker itself. Immutable.

    Args:
        worker: Name of the other worker.
        own: This worker's map for the other; None if it has none.
        others: The other worker's map for this one; None if it has none.
        refuses_unmapped: Whether tensors on a GPU cannot be sent without a map, as in
            ``torch.distributed.rpc``. Otherwise they arrive on the device of the same name.

    Attributes:
        is_any: Whether one of the workers has a map for the other.
        is_identity: Whether all tensors go to the device of the same name; ``forward`` and ``back``
            then return each device, and never raise.
        answers_on_host: Whether answers cannot have tensors on a GPU, as there is no map for them.
        moves_host_of_calls: Whether tensors on the CPU arrive on another device in calls.
        moves_host_of_answers: The same for the answers to the other worker's calls.
    """

    __slots__ = (
        "_back",
        "_forward",
        "_refuses_unmapped",
        "_worker",
        "answers_on_host",
        "is_any",
        "is_identity",
        "moves_host_of_answers",
        "moves_host_of_calls",
    )

    def __init__(
        self,
        worker: str,
        own: DeviceMap | None = None,
        others: DeviceMap | None = None,
        *,
        refuses_unmapped: bool = False,
    ) -> None:
        self._worker = worker
        self._refuses_unmapped = refuses_unmapped
        inverse = None if others is None else {there: here for here, there in others.items()}
        # A worker without a map refuses as one with an empty map.
        missing: DeviceMap | None = {} if refuses_unmapped else None
        self._forward = missing if own is None else own
        self._back = missing if inverse is None else inverse
        self.is_any = own is not None or others is not None
        self.is_identity = not self.is_any and not refuses_unmapped
        self.answers_on_host = refuses_unmapped and others is None
        self.moves_host_of_calls = (self._forward or {}).get(HOST, HOST) != HOST
        self.moves_host_of_answers = (self._back or {}).get(HOST, HOST) != HOST

    def forward(self, device: torch.device) -> torch.device:
        """Returns the other worker's device for a tensor in a call, a post or a stream to it.

        Raises:
            SerializationError: The map has no such device.
        """
        return self._placed(device, self._forward, "Request")

    def back(self, device: torch.device) -> torch.device:
        """Returns the other worker's device for a tensor in the answer to its call.

        Raises:
            SerializationError: The inverse of its map has no such device.
        """
        return self._placed(device, self._back, "Response")

    def moves_host(self, is_back: bool) -> bool:
        """Returns whether tensors on the CPU arrive on another device, in answers or in calls."""
        return self.moves_host_of_answers if is_back else self.moves_host_of_calls

    def check(self, tensors: Iterable[Tensor], is_back: bool) -> None:
        """Raises SerializationError unless all tensors may be sent; see ``forward``."""
        place = self.back if is_back else self.forward
        for tensor in tensors:
            place(tensor.device)

    def _placed(self, device: torch.device, known: DeviceMap | None, kind: str) -> torch.device:
        if known is None:
            return device
        placed = known.get(device)
        if placed is not None:
            return placed
        if device.type in _UNMAPPED:
            return device
        raise self._unmapped(device, known, kind)

    def _unmapped(self, device: torch.device, known: DeviceMap, kind: str) -> SerializationError:
        worker = self._worker
        if kind == "Request":
            whose, adding = f"device map for {worker!r}", f"device {device} to it"
        else:
            whose = f"device map of worker {worker!r} for this worker"
            adding = f"the device there that stands for {device} here"
        listed = ", ".join(map(str, known)) or "no device"
        missing = (
            f"{kind} device mapping is not available for destination {worker}: a tensor is on "
            f"{device}, and the {whose} has {listed}"
        )
        if self._refuses_unmapped:
            text = (
                "TensorPipe RPC backend only supports CPU tensors by default: send tensor.cpu(), "
                "or map the device by `set_device_map` on `TensorPipeRpcBackendOptions`. "
                f"{missing}"
            )
        else:
            text = f"{missing}; send tensor.cpu(), or add {adding} (device_maps)"
        return SerializationError(text, worker=worker)


IDENTITY = DeviceMaps("")
"""The maps between two workers that have none."""


def maps_between(
    me: Registration, other: Registration, *, refuses_unmapped: bool = False
) -> DeviceMaps:
    """Returns the maps between this worker and another, from the registrations of both.

    Args:
        me: This worker's registration.
        other: The other worker's registration; this worker's own for messages to itself.
        refuses_unmapped: See ``DeviceMaps``.
    """
    own = me.devices.maps.get(other.name)
    others = other.devices.maps.get(me.name)
    if own is None and others is None and not refuses_unmapped:
        return IDENTITY
    return DeviceMaps(
        other.name, _devices(own), _devices(others), refuses_unmapped=refuses_unmapped
    )


def _devices(names: Mapping[str, str] | None) -> DeviceMap | None:
    if names is None:
        return None
    return {torch.device(here): torch.device(there) for here, there in names.items()}
