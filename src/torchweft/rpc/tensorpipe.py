"""``TensorPipeRpcBackendOptions``: a worker's options as programs for PyTorch's RPC write them.

Weft has no TensorPipe. Options for devices and transports are checked, kept, and reported to have
no effect.
"""

from __future__ import annotations

import enum
import operator
import threading
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.rpc import constants

DeviceType = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]


class IgnoredOptionWarning(UserWarning):
    """A program sets an option that has no effect in Weft."""


class BackendType(enum.Enum):
    """The back-ends that ``init_rpc`` can be asked for: there is one."""

    TENSORPIPE = "TENSORPIPE"

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


class BackendOptions:
    """Options of every back-end; the base class of the options of each back-end.

    Args:
        rpc_timeout: Default timeout of calls, in seconds; 0 for no limit.
        init_method: How the workers find each other: ``env://``, ``tcp://host:port`` or
            ``file:///path``.

    Raises:
        ArgumentTypeError: A value is of a wrong type.
        ConfigurationError: A value is invalid.
    """

    def __init__(
        self,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
    ) -> None:
        self._set(rpc_timeout=rpc_timeout, init_method=init_method)

    def _set(self, **values: Any) -> None:
        """Sets properties for the constructor, which errors then name."""
        for name, value in values.items():
            try:
                setattr(self, name, value)
            except ArgumentTypeError as error:
                raise ArgumentTypeError(
                    f"incompatible constructor arguments of {type(self).__name__}: {error}"
                ) from None

    @property
    def rpc_timeout(self) -> float:
        """Default timeout of calls, in seconds; 0 for no limit."""
        return self._rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float) -> None:
        if not hasattr(type(seconds), "__float__") and not hasattr(type(seconds), "__index__"):
            raise ArgumentTypeError(
                f"rpc_timeout is {seconds!r}, a {type(seconds).__name__}; pass a number of seconds"
            )
        if not float(seconds) >= 0:
            raise ConfigurationError(f"RPC Timeout must be non-negative, got {seconds!r}")
        self._rpc_timeout = float(seconds)

    @property
    def init_method(self) -> str:
        """How the workers find each other."""
        return self._init_method

    @init_method.setter
    def init_method(self, method: str) -> None:
        if not isinstance(method, str):
            raise ArgumentTypeError(f"init_method is a {type(method).__name__}; pass a str")
        self._init_method = method


class TensorPipeRpcBackendOptions(BackendOptions):
    """Options of back-end ``TENSORPIPE``, which is Weft; ``RpcBackendOptions`` has more of them.

    Args:
        num_worker_threads: Number of user functions that run at a time; a function that waits for
            another worker does not count.
        rpc_timeout: Default timeout of calls, in seconds; 0 for no limit.
        init_method: How the workers find each other.
        device_maps: For each callee, the device that stands for each device of this worker. Checked
            and kept, but a tensor arrives on the device of the same name that it was on.
        devices: Devices of this worker that its calls use. Weft needs no list of them.
        _transports: Ignored: Weft chooses by the capabilities of both workers.
        _channels: Ignored in the same way.

    Raises:
        ArgumentTypeError: A value is of a wrong type.
        ConfigurationError: A value is invalid.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: dict[str, dict[DeviceType, DeviceType]] | None = None,
        devices: list[DeviceType] | None = None,
        _transports: list[str] | None = None,
        _channels: list[str] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self._set(num_worker_threads=num_worker_threads)
        self.device_maps: dict[str, DeviceMap] = {}
        for worker, device_map in (device_maps or {}).items():
            self.device_maps[worker] = _to_device_map(device_map)
        self.devices: list[torch.device] = _to_device_list(devices or [])
        self._transports = _transports
        self._channels = _channels

    @property
    def num_worker_threads(self) -> int:
        """Number of user functions that run at a time."""
        return self._num_worker_threads

    @num_worker_threads.setter
    def num_worker_threads(self, count: int) -> None:
        try:
            number = operator.index(count)
        except TypeError:
            raise ArgumentTypeError(
                f"num_worker_threads is {count!r}, a {type(count).__name__}; pass an int"
            ) from None
        if number < 1:
            raise ConfigurationError(f"num_worker_threads must be positive, got {number}")
        self._num_worker_threads = number

    def set_device_map(self, to: str, device_map: dict[DeviceType, DeviceType]) -> None:
        """Adds to the device map for one worker; see ``device_maps``.

        Args:
            to: Name of the worker that is called.
            device_map: The callee's device for each device of this worker.

        Raises:
            ConfigurationError: A device would have two counterparts.
        """
        added = _to_device_map(device_map)
        known = self.device_maps.get(to, {})
        for here, there in added.items():
            if known.get(here, there) != there:
                raise ConfigurationError(
                    "`set_device_map` only supports 1-to-1 mapping, but for worker "
                    f"{to!r} maps {here} to {there} and to {known[here]}"
                )
        self.device_maps[to] = {**known, **added}

    def set_devices(self, devices: list[DeviceType]) -> None:
        """Sets the CUDA devices of this worker that its calls use; see ``devices``.

        Raises:
            ConfigurationError: A device is not a CUDA device.
        """
        self.devices = _to_device_list(devices)

    def check_device_maps(self, name: str, others: Iterable[str] | None) -> None:
        """Raises ConfigurationError for a device map that is invalid in this group.

        Args:
            name: Name of this worker.
            others: Names of all workers of the group; None if more may join it.
        """
        names = sorted(self.device_maps if others is None else others)
        unknown = sorted(set(self.device_maps) - set(names))
        if unknown:
            raise ConfigurationError(
                f"Node {name} has invalid target node names in its device maps: "
                f"{', '.join(map(repr, unknown))}; the group has {', '.join(map(repr, names))}"
            )
        for to, device_map in self.device_maps.items():
            if len(set(device_map.values())) != len(device_map):
                raise ConfigurationError(
                    f"Node {name} has duplicated target devices in its device map for {to}: "
                    f"{device_map}"
                )

    def ignored(self) -> list[str]:
        """Returns the set options without effect in Weft, and Weft's behaviour instead."""
        maps = self.device_maps.values()
        return [
            explanation
            for is_set, explanation in (
                (self._transports is not None, "_transports (chosen for each pair of workers)"),
                (self._channels is not None, "_channels (chosen for each pair of workers)"),
                (bool(self.devices), "devices (no list of them is needed)"),
                (
                    any(here != there for each in maps for here, there in each.items()),
                    "device_maps (a tensor arrives on the device of the same name that it was on)",
                ),
            )
            if is_set
        ]


_warning_lock = threading.Lock()
_has_warned = False


def warn_of_ignored(options: TensorPipeRpcBackendOptions, stacklevel: int) -> None:
    """Warns, once per process, of options that have no effect.

    Args:
        options: The options.
        stacklevel: Frames from here to the line that called ``init_rpc``.
    """
    global _has_warned
    ignored = options.ignored()
    with _warning_lock:
        if not ignored or _has_warned:
            return
        _has_warned = True
    warnings.warn(
        f"these options of torch.distributed.rpc have no effect in Weft: {'; '.join(ignored)}",
        IgnoredOptionWarning,
        stacklevel=stacklevel + 1,
    )


def _to_device(device: DeviceType) -> torch.device:
    made = _device(device)
    if made.type != "cuda":
        raise ConfigurationError(
            f"`set_devices` expect a list of CUDA devices, but got {made}, of type {made.type}"
        )
    return made


def _device(device: DeviceType) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(
            f"{device!r} is no device of this machine ({error}); name devices like 'cpu' or "
            "'cuda:0'"
        ) from None


def _to_device_list(devices: Iterable[DeviceType]) -> list[torch.device]:
    return [_to_device(device) for device in devices]


def _to_device_map(device_map: Mapping[DeviceType, DeviceType]) -> DeviceMap:
    made: DeviceMap = {}
    for key, value in device_map.items():
        here, there = _device(key), _device(value)
        for other, taken in made.items():
            if taken == there:
                raise ConfigurationError(
                    f"`device_map` only supports 1-to-1 mapping, but maps {here} and {other} "
                    f"to {there}"
                )
        made[here] = there
    return made
