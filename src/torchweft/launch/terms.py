"""Defines the terms of a cluster: its workers, the settings of each, and how it is left."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchweft import knobs
from torchweft.arguments import check_callable, check_type, checked_int, is_number, wrong_type
from torchweft.errors import ConfigurationError
from torchweft.launch.nursery import Nursery
from torchweft.launch.worker import Scrapes, check_seed, identity_environment
from torchweft.scraping import VARIABLE, address_in

if TYPE_CHECKING:
    from torchweft.rpc import RpcBackendOptions

Environment = Mapping[str, str]
DEVICE_VARIABLE = "WEFT_DEVICE"
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True)
class Terms:
    """The terms of one cluster; the arguments of ``torchweft.cluster`` describe them.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        ConfigurationError: An argument has an invalid value.
    """

    names: list[str]
    name: str = "driver"
    options: RpcBackendOptions | None = None
    nursery: Nursery | None = None
    check: bool = True
    restarts: int = 0
    seed: int | None = None
    leave_timeout_s: float = field(default_factory=knobs.LEAVE_TIMEOUT_S.get)
    env: Environment | Mapping[str, Environment] | None = None
    setup: Callable[[], object] | None = None
    threads: int | None = None
    devices: str | Sequence[str] | None = None
    metrics: str | int | None = None

    def __post_init__(self) -> None:
        check_type(self.restarts, int, "restarts", "restarts=2")
        if self.nursery is not None:
            check_type(self.nursery, Nursery, "nursery", "a torchweft.launch.Nursery")
        if self.options is not None:
            from torchweft.rpc import RpcBackendOptions

            fitting = "torchweft.rpc.RpcBackendOptions(...)"
            check_type(self.options, RpcBackendOptions, "rpc_backend_options", fitting)
        check_callable("setup", self.setup, "pass a function without arguments")
        check_seed(self.seed)
        if not is_number(self.leave_timeout_s):
            raise wrong_type("leave_timeout", self.leave_timeout_s, "pass a number of seconds")
        if not self.leave_timeout_s > 0:
            raise ConfigurationError(
                f"leave_timeout is {self.leave_timeout_s}; it must be more than 0 seconds"
            )
        if self.threads is not None and checked_int("threads", self.threads) < 1:
            raise ConfigurationError(f"threads is {self.threads}; it must be at least 1")
        if not isinstance(self.metrics, (str, int, type(None))):
            raise wrong_type("metrics", self.metrics, "pass metrics='0.0.0.0:9400', or a port")
        self._check_env()
        self._check_devices()
        self.scrapes()

    def environment(self, base: Environment) -> dict[str, str]:
        """Returns ``base`` with the variables of all workers, which imports see as well."""
        environment = dict(base)
        if self.threads is not None:
            environment["OMP_NUM_THREADS"] = str(self.threads)
        if self.env and not self._is_env_by_worker():
            environment.update(self.env)  # type: ignore[arg-type]
        return environment

    def environment_of(self, name: str, base: Environment, restarts: int) -> dict[str, str]:
        """Returns ``base`` with one worker's own variables.

        Args:
            name: The worker's name.
            base: The variables of all workers.
            restarts: How often the worker has been restarted.
        """
        local_rank = self.names.index(name)
        identity = identity_environment(
            name, local_rank + 1, len(self.names), restarts, local_rank=local_rank
        )
        environment = {**base, **identity}
        environment.pop("WORLD_SIZE", None)  # of a group that the caller may be in
        if not self.restarts:
            environment["WORLD_SIZE"] = str(len(self.names) + 1)
        if self.devices is not None:
            environment[DEVICE_VARIABLE] = self.device_of(name)
        if self.env and self._is_env_by_worker():
            environment.update(self.env.get(name, {}))  # type: ignore[arg-type]
        return environment

    def scrapes(self) -> Scrapes | None:
        """Returns where the workers of this host serve their metrics; None if they do not.

        The caller has the first port.
        """
        given = knobs.METRICS.get() if self.metrics is None else str(self.metrics)
        if not given:
            return None
        address = address_in(given, VARIABLE if self.metrics is None else "metrics")
        return Scrapes(address, {name: rank for rank, name in enumerate(self.names)}, shift=1)

    def device_of(self, name: str) -> str:
        """Returns the device of a worker; empty if none was given."""
        if self.devices is None:
            return ""
        index = self.names.index(name)
        device = self.devices if isinstance(self.devices, str) else self.devices[index]
        return f"cuda:{index % _cuda_count()}" if device == "cuda" else device

    # Checks

    def _is_env_by_worker(self) -> bool:
        return any(isinstance(value, Mapping) for value in (self.env or {}).values())

    def _check_env(self) -> None:
        env = {} if self.env is None else self.env
        check_type(env, Mapping, "env", "env={'VARIABLE': 'value'}")
        if not self._is_env_by_worker():
            _check_variables(env, "env")
            return
        for name, variables in env.items():
            if name not in self.names:
                raise ConfigurationError(
                    f"env names worker {name!r}, and there is none; the workers are "
                    f"{', '.join(map(repr, self.names))}"
                )
            _check_variables(variables, f"env[{name!r}]")

    def _check_devices(self) -> None:
        if self.devices is None:
            return
        devices = [self.devices] if isinstance(self.devices, str) else self.devices
        check_type(devices, Sequence, "devices", "devices=['cuda:0', 'cuda:1']")
        if not isinstance(self.devices, str) and len(devices) != len(self.names):
            raise ConfigurationError(
                f"devices names {len(devices)} devices for {len(self.names)} workers; name one for "
                "each worker, or one for all: devices='cuda' shares out those of this machine"
            )
        for device in devices:
            check_type(device, str, "a device of devices=", "'cuda:0'")
            if not _DEVICE.fullmatch(device):
                raise ConfigurationError(
                    f"devices has {device!r}; a device is 'cpu', 'cuda' or one like 'cuda:0'"
                )
            number = device.partition(":")[2] or "0"
            if device != "cpu" and int(number) >= _cuda_count():
                raise ConfigurationError(
                    f"devices has {device!r}, but PyTorch finds {_cuda_count()} CUDA devices here; "
                    "devices='cpu' works anywhere"
                )


def _check_variables(variables: Any, argument: str) -> None:
    check_type(variables, Mapping, argument, "{'VARIABLE': 'value'}")
    for variable, value in variables.items():
        check_type(variable, str, f"a variable of {argument}", "its name")
        check_type(value, str, f"{argument}[{variable!r}]", f"{str(value)!r}")
    knobs.check_environment(variables)


def _cuda_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
