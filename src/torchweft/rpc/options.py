"""The options with which a worker joins, and the place in its group that its launcher gives it."""

from __future__ import annotations

import enum
import math
import re
import sys
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchweft import knobs
from torchweft.arguments import UNSET_RPC_TIMEOUT as UNSET_RPC_TIMEOUT
from torchweft.arguments import (
    check_choice,
    check_type,
    checked_int,
    kind_of,
    wrong_type,
)
from torchweft.engine.codec.reading import BY_THEMSELVES, is_part_of_weft
from torchweft.engine.codec.registry import Callables
from torchweft.engine.protocol.registration import Devices
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.probe import is_loopback
from torchweft.rpc.api import RRef
from torchweft.secret import Secret

if TYPE_CHECKING:
    from torchweft.engine.io.secure import TlsOptions

DEFAULT_RPC_TIMEOUT_SEC: float = 60.0
DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_NUM_WORKER_THREADS: int = 16
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)
"""24 days, in effect no limit."""

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


# Finds this process's place in its group, from the variables that its launcher has set.
#
# Launchers nest: ``srun`` may start ``torchrun`` on each node, and ``mpirun`` may start its daemons
# by ``srun``. The innermost launcher counts, as it numbers the processes; the variables of the
# outer ones are inherited. The rules of this file:
#
# - ``find_placement`` is a function of the variables only: it reads no environment, and looks up no
#   names.
# - Each launcher is a row of ``LAUNCHERS``, from those inside of others to the outermost.
# - ``RANK`` and ``WORLD_SIZE`` by hand, or from a container platform, count before a launcher's own
#   variables only if both agree. A batch script that exports ``RANK=0`` for all tasks is refused.
# - A missing rendezvous is an error only for a program that needs one, so it is kept as text.

Variables = Mapping[str, str]

MASTER = ("MASTER_ADDR", "MASTER_PORT")
_MASTER_OF_CONTAINERS = ("PET_MASTER_ADDR", "PET_MASTER_PORT")
_LAST_STEP = 0xFFFFFFF0
"""SLURM's steps from here on are no steps that ``srun`` started: batch, interactive, and so on."""


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher.

    Attributes:
        name: Its name, for messages.
        marks: Variables that are all set if, and only if, this launcher started the process.
        is_innermost: Whether it sets ``RANK`` itself, for each process.
    """

    name: str
    marks: tuple[str, ...]
    rank: str = "RANK"
    size: str = "WORLD_SIZE"
    local_rank: str = "LOCAL_RANK"
    local_size: str = "LOCAL_WORLD_SIZE"
    is_innermost: bool = False

    def is_present(self, variables: Variables) -> bool:
        """Whether this launcher has started the process, or one around it."""
        if not all(mark in variables for mark in self.marks):
            return False
        if self is KUBEFLOW:
            return variables["PET_NNODES"].isdigit()
        return self is not SRUN or _is_step(variables)


WEFT = Launcher("torchweft run", ("RANK", "WEFT_RESTART_COUNT"), is_innermost=True)
TORCHRUN = Launcher("torchrun", ("RANK", "TORCHELASTIC_RUN_ID"), is_innermost=True)
OPEN_MPI = Launcher(
    "mpirun of Open MPI",
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
SRUN = Launcher(
    "srun",
    ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "",
)
# A process that srun starts with --mpi=pmi2 has these as well; mpiexec inside of a step hides it.
PMI = Launcher(
    "mpiexec (PMI)",
    ("PMI_RANK", "PMI_SIZE"),
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
)
# The command of a task runs once on each node; it may start the other launchers.
SKYPILOT = Launcher(
    "SkyPilot",
    ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
    "SKYPILOT_NODE_RANK",
    "SKYPILOT_NUM_NODES",
    "",
    "",
)
# One worker in each container; torchrun reads these variables and sets RANK for several.
KUBEFLOW = Launcher(
    "Kubeflow", ("PET_NODE_RANK", "PET_NNODES"), "PET_NODE_RANK", "PET_NNODES", "", ""
)
PLAIN = Launcher("RANK and WORLD_SIZE", ("RANK",))
LAUNCHERS = (TORCHRUN, WEFT, OPEN_MPI, PMI, SRUN, SKYPILOT, KUBEFLOW)


_CONTAINERS = {"JOBSET_NAME": "JobSet", "PET_NODE_RANK": "PyTorchJob"}
"""Variables of systems that set ``RANK`` for each container, with the names of the systems."""


def name_of(launcher: Launcher, variables: Variables) -> str:
    """Returns the name of a launcher for messages."""
    if launcher not in (WEFT, PLAIN):
        return launcher.name
    if "LOCAL_RANK" in variables:  # started within the container
        return launcher.name
    return next((name for mark, name in _CONTAINERS.items() if mark in variables), launcher.name)


def _is_step(variables: Variables) -> bool:
    step = variables["SLURM_STEP_ID"]
    return step.isdigit() and int(step) < _LAST_STEP


def number(variables: Variables, name: str) -> int:
    """Returns a variable's value; raises ConfigurationError if it is no number from 0 on."""
    text = variables[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigurationError(f"environment variable {name} is {text!r}, which is no number")
    return int(text)


_LOOPBACK = "127.0.0.1"
_FIRST_PORT = 17_000
_PORTS = 15_000
"""Derived ports end below 32,768, where Linux begins to give out ports by itself."""
_RANGES = r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOSTS = re.compile(rf"((?:[^\[\],]|{_RANGES})+)(?:,(?:[^\[\],]|{_RANGES})+)*")
"""A compact list of SLURM, like ``n[01-03,7]-gpu,login``; its first group has the first host."""


@dataclass(frozen=True)
class Meeting:
    """Where the workers meet, by which init method, and from which variables that is known."""

    host: str = ""
    port: str = ""
    sources: tuple[str, ...] = ()
    method: str = ""
    missing: str = ""
    """Why the place is unknown, and how to give it; for errors."""

    @property
    def place(self) -> str:
        """Host and port; empty if the host is unknown."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.host else ""

    @property
    def init_method(self) -> str:
        """The init method; empty if the host is unknown."""
        return self.method or (f"tcp://{self.place}" if self.host else "")


def derived(launcher: Launcher, size: int, variables: Variables) -> Meeting:
    """Returns where the workers of a launcher meet that may not set ``MASTER_ADDR``."""
    found = _first_host(launcher, size, variables)
    if "MASTER_ADDR" in variables:
        found = Meeting(variables["MASTER_ADDR"], sources=("MASTER_ADDR",))
    if found.missing:
        return found
    read: tuple[str, ...]
    if "MASTER_PORT" in variables:
        port, read = number(variables, "MASTER_PORT"), MASTER[1:]
    else:
        port, read = _derived_port(launcher, variables)
    if not read:
        missing = f"{launcher.name} sets no variable that names its job; set MASTER_PORT"
        return Meeting(missing=missing)
    return Meeting(found.host, str(port), (*found.sources, *read))


def _first_host(launcher: Launcher, size: int, variables: Variables) -> Meeting:
    """Returns the host of rank 0, without a port."""
    if launcher is SRUN:
        nodes, distribution = "SLURM_STEP_NODELIST", variables.get("SLURM_DISTRIBUTION", "")
        if variables.get("SLURM_STEP_NUM_NODES") == "1":
            return Meeting(_LOOPBACK, sources=("SLURM_STEP_NUM_NODES",))
        if nodes not in variables or distribution.startswith("arbitrary"):
            missing = f"{nodes} does not tell which node has rank 0; set MASTER_ADDR to it"
            return Meeting(missing=missing)
        return Meeting(first_of(variables[nodes]), sources=(nodes,))
    if launcher is SKYPILOT:
        if size == 1:
            return Meeting(_LOOPBACK)
        return Meeting(variables["SKYPILOT_NODE_IPS"].split()[0], sources=("SKYPILOT_NODE_IPS",))
    if launcher is KUBEFLOW:
        if not all(name in variables for name in _MASTER_OF_CONTAINERS):
            return Meeting(missing="set MASTER_ADDR and MASTER_PORT, where rank 0 is reached")
        return Meeting(variables["PET_MASTER_ADDR"], sources=_MASTER_OF_CONTAINERS[:1])
    local = launcher.local_size
    if size == 1 or variables.get(local) == str(size):
        return Meeting(_LOOPBACK, sources=(local,) if local in variables else ())
    return Meeting(
        missing=f"{launcher.name} has started workers on several hosts, and its variables do not "
        "tell which host has rank 0; set MASTER_ADDR to that host, the same for all workers "
        "(mpirun of Open MPI: -x MASTER_ADDR=HOST, mpiexec: -genv MASTER_ADDR HOST)"
    )


def _derived_port(launcher: Launcher, variables: Variables) -> tuple[int, tuple[str, ...]]:
    """Returns a port that the workers of one job agree on, and other jobs probably do not have."""
    if launcher is SRUN and "SLURM_JOB_ID" in variables:
        job, step = number(variables, "SLURM_JOB_ID"), number(variables, "SLURM_STEP_ID")
        return _FIRST_PORT + (job * 17 + step) % _PORTS, ("SLURM_JOB_ID", "SLURM_STEP_ID")
    if launcher is KUBEFLOW and "PET_MASTER_PORT" in variables:
        return number(variables, "PET_MASTER_PORT"), _MASTER_OF_CONTAINERS[1:]
    if launcher is SKYPILOT:
        names: tuple[str, ...] = ("SKYPILOT_TASK_ID", "SKYPILOT_INTERNAL_JOB_ID")
    else:
        names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PMI_PORT")
    for name in names:
        if name in variables:
            return _FIRST_PORT + zlib.crc32(variables[name].encode()) % _PORTS, (name,)
    return 0, ()


def first_of(text: str) -> str:
    """Returns the first host of a compact list of SLURM: ``n01-gpu`` of ``n[01-03,7]-gpu,login``.

    Raises:
        ConfigurationError: The text is no such list.
    """
    found = _HOSTS.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"{text!r} is no list of hosts; one looks like n[01-03,7],login")
    return re.sub(_RANGES, r"\1", found[1])


@dataclass(frozen=True)
class Placement:
    """The place of a process in its group.

    Attributes:
        launcher: Name of the launcher, for messages; empty if none was found.
        rank: The rank; None if unknown.
        world_size: Number of workers; None if unknown, or if the group is open.
        local_rank: Number among the workers of this host; None if unknown.
        local_world_size: Number of workers on this host; None if unknown.
        meeting: Where the workers meet, or why that, or the rank, is unknown.
        sources: The variables that were read.
    """

    launcher: str = ""
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    meeting: Meeting = Meeting()
    sources: tuple[str, ...] = field(default=(), compare=False)

    @property
    def sentence(self) -> str:
        """The finding in one line, for the log; empty if no launcher was found."""
        if not self.launcher or self.rank is None:
            return ""
        size = "an open group" if self.world_size is None else str(self.world_size)
        where = f", meeting at {self.meeting.place}" if self.meeting.host else ""
        return f"{self.launcher}: rank {self.rank} of {size}{where} ({', '.join(self.sources)})"

    @property
    def variables(self) -> dict[str, str]:
        """Rank and size in the variables that ``torchrun`` would set; empty without a rank."""
        values = {"RANK": self.rank, "WORLD_SIZE": self.world_size}
        if None not in (self.local_rank, self.local_world_size):
            values |= {"LOCAL_RANK": self.local_rank, "LOCAL_WORLD_SIZE": self.local_world_size}
        return {name: str(value) for name, value in values.items() if value is not None}


def find_placement(variables: Variables) -> Placement:
    """Returns the place that the environment variables of a launcher describe.

    Args:
        variables: Environment variables by name.

    Returns:
        The place; one without a rank if no launcher has set any.

    Raises:
        ConfigurationError: Variables contradict each other, or cannot be read; names them.
    """
    launcher = next((each for each in LAUNCHERS if each.is_present(variables)), None)
    if launcher is None and "RANK" not in variables:
        size = number(variables, "WORLD_SIZE") if "WORLD_SIZE" in variables else None
        return Placement(world_size=size, meeting=Meeting(missing=_hint(variables)))
    if launcher is None:
        return _place(PLAIN, variables)
    is_plain = (
        "RANK" in variables
        and not launcher.is_innermost
        # A platform sets both for its containers, and ``name_of`` knows its name.
        and (not _agrees(launcher, variables) or launcher is KUBEFLOW)
    )
    return _place(PLAIN if is_plain else launcher, variables)


def _place(launcher: Launcher, variables: Variables) -> Placement:
    """Returns the place that one launcher's variables describe."""
    if launcher is PMI and SRUN.is_present(variables) and _are_equal(PMI, SRUN, variables):
        launcher = SRUN
    rank = number(variables, launcher.rank)
    size = number(variables, launcher.size) if launcher.size in variables else None
    if size is not None and rank >= size:
        raise ConfigurationError(
            f"environment variable {launcher.rank} is {rank}, but {launcher.size} is {size}: "
            f"ranks go from 0 to {size - 1}; correct or unset both"
        )
    if launcher.rank != "RANK" and "WORLD_SIZE" in variables:
        _check_size(launcher, variables)
    meeting = Meeting()
    if all(name in variables for name in MASTER):
        # PyTorch reads more variables for this method, such as those of torchrun.
        meeting = Meeting(variables["MASTER_ADDR"], variables["MASTER_PORT"], MASTER, "env://")
    elif launcher.rank != "RANK":
        meeting = derived(launcher, size or 1, variables)
    local_rank, local_size = (
        number(variables, name) if name in variables else None
        for name in (launcher.local_rank, launcher.local_size)
    )
    read = (launcher.rank, *([launcher.size] if size is not None else []), *meeting.sources)
    name = name_of(launcher, variables)
    return Placement(name, rank, size, local_rank, local_size, meeting, read)


def _are_equal(one: Launcher, other: Launcher, variables: Variables) -> bool:
    pairs = ((one.rank, other.rank), (one.size, other.size))
    return all(variables[first] == variables[second] for first, second in pairs)


def _agrees(launcher: Launcher, variables: Variables) -> bool:
    """Whether ``RANK`` and ``WORLD_SIZE`` say the same as a launcher's own variables.

    They need not if the program itself starts several processes in each task. It then tells them a
    local rank, and there are more processes than tasks. A step of one task may be a shell.

    Raises:
        ConfigurationError: They contradict the launcher.
    """
    tasks = number(variables, launcher.size)
    rank, size = number(variables, "RANK"), variables.get("WORLD_SIZE", "")
    is_nested = "LOCAL_RANK" in variables and size.isdigit() and int(size) > tasks
    if is_nested or tasks == 1:
        return False
    if rank != number(variables, launcher.rank):
        raise ConfigurationError(
            f"environment variable RANK is {rank}, but {launcher.rank} of {launcher.name} is "
            f"{variables[launcher.rank]}; unset RANK and WORLD_SIZE (a batch script may export "
            f"them), or set RANK=${launcher.rank} in each task"
        )
    if size:
        _check_size(launcher, variables)
    return True


def _check_size(launcher: Launcher, variables: Variables) -> None:
    size, tasks = number(variables, "WORLD_SIZE"), number(variables, launcher.size)
    if size != tasks:
        raise ConfigurationError(
            f"environment variable WORLD_SIZE is {size}, but {launcher.size} of {launcher.name} is "
            f"{tasks}; unset WORLD_SIZE, or start {size} tasks"
        )


_HINTS = {
    "SLURM_JOB_ID": "start the script with srun, as srun did not start this process of SLURM job "
    "{}: write 'srun python SCRIPT'",
    "PMIX_RANK": "set RANK=$PMIX_RANK and WORLD_SIZE in each process: PMIx has a rank for it, but "
    "no variable with the number of processes",
    "PET_NNODES": "start the script with 'torchrun' and no options, which reads the PET_ "
    "variables: PET_NNODES is {}, a number that may change",
    "JOB_COMPLETION_INDEX": "set RANK=$JOB_COMPLETION_INDEX, WORLD_SIZE, MASTER_ADDR and "
    "MASTER_PORT in each pod: an indexed Job of Kubernetes tells a pod neither their number nor "
    "where to meet; 'torchweft manifest' writes a JobSet that does",
}
"""Why there is no rank although a launcher is near, by a variable of that launcher."""


def _hint(variables: Variables) -> str:
    """Returns why there is no rank, and how to give it."""
    for name, hint in _HINTS.items():
        if name in variables:
            return hint.format(variables[name])
    return "start the script with 'torchweft run', 'torchrun', 'srun' or 'mpirun'"
