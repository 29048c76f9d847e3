"""The options with which a worker joins, also as programs for PyTorch's RPC write them."""

from __future__ import annotations

import enum
import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchweft import knobs
from torchweft.arguments import check_choice, check_type, checked_int, kind_of, wrong_type
from torchweft.engine.codec.reading import BY_THEMSELVES, is_part_of_weft
from torchweft.engine.codec.registry import Callables
from torchweft.engine.io.addresses import is_loopback
from torchweft.engine.protocol.registration import Devices
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.rpc.constants import (
    DEFAULT_INIT_METHOD,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
)
from torchweft.rpc.rref import RRef
from torchweft.secret import Secret

if TYPE_CHECKING:
    from torchweft.engine.io.secure import TlsOptions

DeviceType = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]


def _allowed_from_outside() -> tuple[str, ...] | None:
    modules = [module.strip() for module in knobs.ALLOWED_MODULES.get().split(",")]
    return tuple(module for module in modules if module) or None


def _tls_from_environment() -> TlsOptions | None:
    if not any(knob.get() for knob in knobs.TLS_NAMES):
        return None
    from torchweft.engine.io.secure import TlsOptions  # Most workers have no TLS.

    return TlsOptions.from_environment()


_CHOICES = {
    "lost_gradients": ("raise", "warn"),
    "unmapped_devices": ("same", "refuse"),
    "other_versions": ("refuse", "warn"),
}


@dataclass
class RpcBackendOptions:
    """Options of one worker.

    Attributes:
        num_worker_threads: Number of user functions that run at a time. A function that waits for
            another worker does not count, so circular calls never run out of threads.
        rpc_timeout: Default timeout of calls, in seconds; 0 for no limit.
        init_method: How the workers find each other: ``env://`` (``MASTER_ADDR`` and
            ``MASTER_PORT``, as ``torchweft run`` and ``torchrun`` set them), ``tcp://host:port``
            (where rank 0 runs), or ``file:///path`` (on a file system that all share).
        store: A ``torch.distributed.Store`` to use instead of ``init_method``; a group needs one
            without keys of an earlier group.
        init_timeout: Seconds to wait for all workers to join.
        listen: Address of this machine on which other hosts can reach this worker; needs a
            ``secret``. By default the address in ``WEFT_LISTEN``. If that is empty: with a secret,
            this machine's address on the way to the rendezvous store; without a secret, none, so
            that only workers of this host connect.
        secret: Secret that all workers of the group share and nobody else has. By default taken
            from ``WEFT_SECRET_FILE`` or ``WEFT_SECRET``. Without a secret, only workers of the
            same user on the same host can connect to each other.
        tls: TLS settings for TCP connections; give them to all workers. By default taken from the
            ``WEFT_TLS_...`` variables.
        detection_time: Seconds without an answer from another worker's machine after which that
            worker is lost. The machine of a busy worker answers.
        reconnect_time: Seconds within which a broken connection is made again; after them the
            worker at its other end is lost.
        reference_type: Class of the references that this worker makes and receives; a subclass
            of ``RRef``.
        copy_to_self: Whether tensors in calls of this worker to itself are copied, as in calls to
            other workers. By default both sides have the same tensors.
        lost_gradients: Effect on a local backward pass, ``loss.backward()``, that ends in a tensor
            which another worker computed, and sent outside of an autograd context. ``"raise"``:
            it raises an ``AutogradError``. ``"warn"``: the graph is not kept, the tensor is a
            leaf, and the first such pass warns, as in ``torch.distributed.rpc``.
        allowed_modules: Modules, with their submodules, whose functions and classes others may
            call on or send to this worker; ``"torch"`` means its parts that compute. By default
            the modules in ``WEFT_ALLOWED_MODULES``; None if it is unset, which allows all. A guard
            against mistakes, not against attackers; cannot be combined with ``strict``.
        strict: Whether this worker refuses pickles (it accepts tensors, numbers, texts, references
            and containers of them), runs only functions that are registered (``rpc.register``),
            and calls only methods that are declared (``rpc.expose``). See the page on callables.
        callables: Functions and classes that other workers may call on a strict worker, beside
            those that the program registers: ``(torch.nn.Linear, torch.optim.SGD)``.
        device_maps: For each worker that this one calls, by name, the device there that stands for
            each device here: ``{"server": {"cuda:0": "cuda:1"}}``. Tensors in calls follow the
            map, and tensors in their answers its inverse. With a map, a tensor on another GPU
            cannot be sent to that worker. See the page on devices.
        devices: The CUDA devices of this worker that device maps may name, its own and those of
            others; by default all.
        unmapped_devices: Where a tensor on a GPU goes if there is no device map. ``"same"``: to
            the device of the same name. ``"refuse"``: nowhere, sending it raises a
            ``SerializationError``, as in ``torch.distributed.rpc``.
        other_versions: Effect of a worker that runs another minor version of torch. ``"refuse"``:
            none of the workers joins, and ``init_rpc`` raises a ``ConfigurationError``.
            ``"warn"``, if all workers have it: they join, and warn, as in
            ``torch.distributed.rpc``.
    """

    num_worker_threads: int = field(default_factory=knobs.WORKER_THREADS.get)
    rpc_timeout: float = field(default_factory=knobs.RPC_TIMEOUT_S.get)
    init_method: str | None = None
    store: Any = None
    init_timeout: float = field(default_factory=knobs.INIT_TIMEOUT_S.get)
    listen: str = field(default_factory=knobs.LISTEN.get)
    secret: Secret | None = field(default_factory=Secret.from_environment)
    tls: TlsOptions | None = field(default_factory=_tls_from_environment)
    detection_time: float = field(default_factory=knobs.DETECTION_S.get)
    reconnect_time: float = field(default_factory=knobs.RECONNECT_S.get)
    reference_type: type[RRef[Any]] = RRef
    copy_to_self: bool = False
    lost_gradients: Literal["raise", "warn"] = "raise"
    allowed_modules: Sequence[str] | None = field(default_factory=_allowed_from_outside)
    strict: bool = False
    callables: Sequence[Any] = ()
    device_maps: Mapping[str, Mapping[DeviceType, DeviceType]] = field(default_factory=dict)
    devices: Sequence[DeviceType] = ()
    unmapped_devices: Literal["same", "refuse"] = "same"
    other_versions: Literal["refuse", "warn"] = "refuse"

    @property
    def default_timeout_s(self) -> float:
        """``rpc_timeout`` with infinity for no limit."""
        return self.rpc_timeout or math.inf

    def check(self) -> None:
        """Raises ConfigurationError for the first invalid value."""
        if checked_int("num_worker_threads", self.num_worker_threads) < 1:
            raise ConfigurationError(
                f"num_worker_threads is {self.num_worker_threads!r}; it must be at least 1"
            )
        self._check_seconds("rpc_timeout", 0.0, "a number of seconds, or 0 for no limit", math.inf)
        self._check_seconds("init_timeout", math.ulp(0.0), "a positive number of seconds")
        for name in ("detection_time", "reconnect_time"):
            self._check_seconds(name, 0.5, "0.5 seconds at least")
        for name in ("init_method", "listen"):
            text = getattr(self, name)
            check_type("" if text is None else text, str, name, "a str")
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        self._check_protection()
        if self.store is not None and self.init_method is not None:
            raise ConfigurationError("give init_method or store, not both")
        self._check_callables()
        self._check_modules()
        self._named_devices()

    def _check_seconds(
        self, name: str, least_s: float, rule: str, most_s: float = sys.float_info.max
    ) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)):
            raise wrong_type(name, value, "pass a number of seconds")
        if not least_s <= value <= most_s:
            raise ConfigurationError(f"{name} is {value!r}; it must be {rule}")

    def device_settings(self) -> Devices:
        """Returns the device maps and devices as this worker registers them.

        Counts the CUDA devices if one of them is named, without initialising CUDA.
        """
        named = self._named_devices()
        if not named.names_cuda:
            return named
        return Devices(named.maps, named.listed, torch.cuda.device_count())

    def _named_devices(self) -> Devices:
        example = "a dict of dicts like {'server': {'cuda:0': 'cuda:1'}}"
        check_type(self.device_maps, Mapping, "device_maps", example)
        if isinstance(self.devices, str) or not isinstance(self.devices, Iterable):
            raise wrong_type("devices", self.devices, "pass a list like ['cuda:0', 'cuda:1']")
        maps = {}
        for worker, device_map in self.device_maps.items():
            check_type(worker, str, "a key of device_maps", "the name of a worker")
            example = "a dict like {'cuda:0': 'cuda:1'}"
            check_type(device_map, Mapping, f"the device map for {worker!r}", example)
            maps[worker] = {_named(here): _named(there) for here, there in device_map.items()}
        return Devices(maps, tuple(map(_named, _to_device_list(self.devices))))

    def _check_callables(self) -> None:
        if isinstance(self.callables, str) or not isinstance(self.callables, Iterable):
            fitting = "pass a tuple of functions and classes like (torch.nn.Linear, evaluate)"
            raise wrong_type("callables", self.callables, fitting)
        if not self.strict:
            if self.callables:
                raise ConfigurationError(
                    "callables is for a strict worker, and this one would run anything; pass "
                    "strict=True as well"
                )
            return
        Callables(self.callables)
        if self.allowed_modules is not None:
            raise ConfigurationError(
                "a strict worker takes no allowed_modules (or WEFT_ALLOWED_MODULES): it runs what "
                "is registered one by one, as modules contain more than one knows; put "
                "@rpc.register above the functions that others call, or name them in "
                "callables=(...)"
            )

    def _check_modules(self) -> None:
        modules = self.allowed_modules
        if modules is None:
            return
        if isinstance(modules, str) or not isinstance(modules, Iterable):
            fitting = "pass a tuple of names like ('my_package', 'torch'), or None for all"
            raise wrong_type("allowed_modules", modules, fitting)
        for module in modules:
            if not isinstance(module, str) or not all(map(str.isidentifier, module.split("."))):
                raise ConfigurationError(
                    f"allowed_modules has {module!r}, which is no name of a module"
                )
            if module == "builtins":
                raise ConfigurationError(
                    "allowed_modules must not have 'builtins': it has eval and __import__; what "
                    "is harmless in it needs no entry"
                )
            if is_part_of_weft(module) and not module.startswith(BY_THEMSELVES):
                raise ConfigurationError(
                    f"allowed_modules must not have {module!r}: what Weft calls on other workers "
                    f"needs no entry, but for {', '.join(map(repr, BY_THEMSELVES))}"
                )

    def _check_protection(self) -> None:
        if self.secret is not None and not isinstance(self.secret, Secret):
            # Do not show the value: it may be the secret.
            raise ArgumentTypeError(
                f"secret is {kind_of(self.secret)}; pass torchweft.Secret.from_file(path)"
            )
        if self.tls is not None:
            from torchweft.engine.io.secure import TlsOptions

            if not isinstance(self.tls, TlsOptions):
                raise wrong_type("tls", self.tls, "pass torchweft.TlsOptions(...)")
            self.tls.check()
        if self.secret is None and self.listen and not is_loopback(self.listen):
            raise ConfigurationError(
                f"this worker is to listen on {self.listen!r}, where other machines reach it, but "
                "there is no secret: any program that reaches it could run code here. Make one "
                "with 'torchweft secret new FILE', copy it to every host, and set "
                f"{knobs.SECRET_FILE.variable}=FILE there (or pass secret=...)"
            )


# The options of ``torch.distributed.rpc``. Weft has no TensorPipe. Options for transports are kept,
# and reported to have no effect.


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
        ArgumentTypeError: A value is of a wrong type, also one that is set later.
        ConfigurationError: A value is invalid, likewise.
    """

    rpc_timeout: float
    init_method: str

    def __init__(
        self,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
    ) -> None:
        self._set(rpc_timeout=rpc_timeout, init_method=init_method)

    def _set(self, **values: Any) -> None:
        """Sets options for the constructor, which errors then name."""
        for name, value in values.items():
            try:
                setattr(self, name, value)
            except ArgumentTypeError as error:
                raise ArgumentTypeError(
                    f"incompatible constructor arguments of {type(self).__name__}: {error}"
                ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, _checked(name, value))


def _checked(name: str, value: Any) -> Any:
    """Returns what an option becomes that is set to a value, or raises."""
    if name == "rpc_timeout":
        if not hasattr(type(value), "__float__") and not hasattr(type(value), "__index__"):
            raise wrong_type(name, value, "pass a number of seconds")
        value = float(value)
        if not value >= 0:
            raise ConfigurationError(f"RPC Timeout must be non-negative, got {value!r}")
    elif name == "init_method":
        check_type(value, str, name, "a str")
    elif name == "num_worker_threads":
        value = checked_int(name, value)
        if value < 1:
            raise ConfigurationError(f"{name} must be positive, got {value}")
    return value


class TensorPipeRpcBackendOptions(BackendOptions):
    """Options of back-end ``TENSORPIPE``, which is Weft; ``RpcBackendOptions`` has more of them.

    Args:
        num_worker_threads: Number of user functions that run at a time; a function that waits for
            another worker does not count.
        rpc_timeout: Default timeout of calls, in seconds; 0 for no limit.
        init_method: How the workers find each other.
        device_maps: For each callee, by name, the device there that stands for each device of this
            worker; see ``RpcBackendOptions``.
        devices: The CUDA devices of this worker that device maps may name; by default all.
        _transports: Ignored: Weft chooses by the capabilities of both workers.
        _channels: Ignored in the same way.

    Raises:
        ArgumentTypeError: A value is of a wrong type.
        ConfigurationError: A value is invalid.
    """

    num_worker_threads: int

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
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

    def ignored(self) -> list[str]:
        """Returns the set options without effect in Weft, and Weft's behaviour instead."""
        given = {"_transports": self._transports, "_channels": self._channels}
        names = [name for name, value in given.items() if value is not None]
        return [f"{name} (chosen for each pair of workers)" for name in names]


def from_tensorpipe(given: TensorPipeRpcBackendOptions, **others: Any) -> RpcBackendOptions:
    """Converts PyTorch's options, and adds ``others``, which PyTorch's options lack."""
    if "store" not in others and given.init_method != DEFAULT_INIT_METHOD:
        others["init_method"] = given.init_method
    return RpcBackendOptions(
        num_worker_threads=given.num_worker_threads,
        rpc_timeout=given.rpc_timeout,
        device_maps=given.device_maps,  # type: ignore[arg-type]  # The keys are invariant.
        devices=given.devices,
        **others,
    )


def warn_of_ignored(options: TensorPipeRpcBackendOptions, stacklevel: int) -> None:
    """Warns of options that have no effect.

    Args:
        options: The options.
        stacklevel: Frames from here to the line that called ``init_rpc``.
    """
    ignored = options.ignored()
    if ignored:
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


def _named(device: DeviceType) -> str:
    made = _device(device)
    if made.type == "cpu":
        return "cpu"
    if made.type != "cuda":
        raise ConfigurationError(
            f"device_maps and devices have {made}; they map the CPU and CUDA devices only"
        )
    if made.index is None:
        raise ConfigurationError(
            f"device_maps and devices have {device!r}, without an index; write 'cuda:0'"
        )
    return str(made)


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
