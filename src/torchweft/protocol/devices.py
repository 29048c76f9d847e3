"""The device maps of a group as texts: how workers register theirs, and whether they fit together.

Devices are named ``cpu`` and ``cuda:0``, as by torch. A worker registers its maps only if it has
some, or a list of devices. It counts its CUDA devices only if one of these names such a device.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchweft.errors import ConfigurationError

DEVICES = "devices"
"""Fact: the device maps of a worker, its list of devices, and its number of CUDA devices."""

_NAME = re.compile(r"cpu|cuda:(0|[1-9][0-9]{0,2})")
_NAMED = 8
"""How many workers or devices an error names."""

_MOST = 1000
"""How many CUDA devices a worker may have."""

DeviceNames = dict[str, str]
"""A device map: the receiver's device for each device of the sender."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The settings of one worker for devices.

    Attributes:
        maps: Its device map for each worker that it calls, by name.
        listed: The CUDA devices that it may use; empty for all.
        count: The number of its CUDA devices; None if it has not counted them.
    """

    maps: dict[str, DeviceNames] = field(default_factory=dict)
    listed: tuple[str, ...] = ()
    count: int | None = None

    @property
    def names_cuda(self) -> bool:
        """Whether a map or the list names a CUDA device of this worker or another."""
        return bool(self.listed) or any(
            name != "cpu" for names in self.maps.values() for pair in names.items() for name in pair
        )

    def as_facts(self) -> dict[str, Any]:
        """Returns the facts to register; none if there are neither maps nor a list."""
        if not self.maps and not self.listed:
            return {}
        return {DEVICES: {"maps": self.maps, "listed": list(self.listed), "count": self.count}}

    @staticmethod
    def read(facts: Mapping[str, Any]) -> Devices:
        """Reads the facts of a registration.

        Raises:
            ValueError: They are malformed; or a KeyError, TypeError or AttributeError.
        """
        if DEVICES not in facts:
            return NO_DEVICES
        told = facts[DEVICES]
        maps, listed, count = told["maps"], tuple(told["listed"]), told["count"]
        names = [
            name
            for worker, each in maps.items()
            for pair in _checked(worker, each).items()
            for name in pair
        ]
        for name in (*names, *listed):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ValueError(f"it has {name!r} where a device belongs")
        if count is not None and (type(count) is not int or not 0 <= count <= _MOST):
            raise ValueError(f"it has {count!r} CUDA devices")
        return Devices(maps, listed, count)


def _checked(worker: object, names: Any) -> DeviceNames:
    if not isinstance(worker, str) or not isinstance(names, dict):
        raise TypeError(f"it has {names!r} where a device map for {worker!r} belongs")
    return names


NO_DEVICES = Devices()
"""The settings of a worker that has none."""


def check_devices(workers: Mapping[str, Devices], *, is_open: bool) -> None:
    """Checks the settings of all workers of a group against each other.

    Workers are checked in their order, so the error is about the first. It begins as that of
    ``torch.distributed.rpc``.

    Args:
        workers: The settings by the name of the worker, in the order of their ranks.
        is_open: Whether workers may join later, so that maps may be for workers not there yet.

    Raises:
        ConfigurationError: The settings of a worker are invalid, or do not fit those of another.
    """
    for name, devices in workers.items():
        _check_list(name, devices)
    for name, devices in workers.items():
        unknown = sorted(devices.maps.keys() - workers.keys())
        if unknown and not is_open:
            raise ConfigurationError(
                f"Node {name} has invalid target node names in its device maps: "
                f"{_some(map(repr, unknown))}; the group has {_some(map(repr, sorted(workers)))}"
            )
        for to, names in devices.maps.items():
            _check_map(name, devices, to, names, workers.get(to, NO_DEVICES))


def _check_list(name: str, devices: Devices) -> None:
    if len(set(devices.listed)) < len(devices.listed):
        raise ConfigurationError(
            f"Node {name} has duplicated devices: {_some(devices.listed)}; name each once"
        )
    if not _are_there(devices.listed, devices.count):
        raise ConfigurationError(
            f"Node {name} has devices with invalid indices: {_some(devices.listed)}; "
            f"{_counted(name, devices)}"
        )


def _check_map(name: str, own: Devices, to: str, names: DeviceNames, theirs: Devices) -> None:
    shown = _some(f"{here} to {there}" for here, there in names.items())
    map_of = f"in its device map for {to} ({shown})"
    if len(set(names.values())) < len(names):
        raise ConfigurationError(
            f"Node {name} has duplicated target devices {map_of}; map each to a device of its own"
        )
    for kind, wanted, worker, devices in (
        ("source", names.keys(), name, own),
        ("target", names.values(), to, theirs),
    ):
        if devices.listed:
            if not _are_listed(wanted, devices.listed):
                raise ConfigurationError(
                    f"Node {name} has unexpected {kind} devices {map_of}; worker {worker!r} lists "
                    f"{_some(devices.listed)} as its devices"
                )
        elif not _are_there(wanted, devices.count):
            raise ConfigurationError(
                f"Node {name} has {kind} devices with invalid indices {map_of}; "
                f"{_counted(worker, devices)}"
            )


def _are_listed(names: Iterable[str], listed: Collection[str]) -> bool:
    return all(name == "cpu" or name in listed for name in names)


def _are_there(names: Iterable[str], count: int | None) -> bool:
    if count is None:
        return True
    return all(name == "cpu" or int(name.removeprefix("cuda:")) < count for name in names)


def _counted(worker: str, devices: Devices) -> str:
    if not devices.count:
        return f"worker {worker!r} has no CUDA device"
    return f"worker {worker!r} has {_some(f'cuda:{index}' for index in range(devices.count))}"


def _some(texts: Iterable[str]) -> str:
    first = list(itertools.islice(texts, _NAMED + 1))
    return ", ".join(first[:_NAMED]) + (", ..." if len(first) > _NAMED else "")
