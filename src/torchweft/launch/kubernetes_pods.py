"""The workers of a run on Kubernetes as pods: what describes them, with all checks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchweft.engine.io.addresses import is_loopback
from torchweft.errors import ConfigurationError
from torchweft.launch.worker import worker_names
from torchweft.scraping import Address

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
_CORES = re.compile(r"(?=.*[1-9])\d+(\.\d+)?m?")
_BYTES = re.compile(r"(?=.*[1-9])\d+(\.\d+)?([kMGTPE]|[KMGTPE]i)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST_NAME = 40
"""Pods append the replicated job, two numbers and a suffix, and have at most 63 characters."""
_RESERVED = frozenset(
    (
        "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT JOBSET_NAME WORKER_INDEX WEFT_WORKER_NAME "
        "WEFT_RESTART_COUNT WEFT_SECRET WEFT_SECRET_FILE WEFT_TLS_CERT WEFT_TLS_KEY WEFT_TLS_CA"
    ).split()
)


@dataclass(frozen=True, kw_only=True)
class Pods:
    """The workers of a run as pods.

    Attributes:
        image: The container image, which has torch, Weft and the script.
        command: The program and its arguments.
        name: Name of the run.
        namespace: Its namespace; empty for that of the context.
        workers: How many workers.
        names: Their names by rank; None for a prefix and the rank.
        name_prefix: That prefix.
        cpus: Cores of each worker, as ``2`` or ``500m``; empty for no limit.
        gpus: GPUs of each worker.
        memory: Memory of each worker, as ``8Gi``; empty for no limit.
        shared_memory: Size of ``/dev/shm``.
        secret: Name of the Secret with the secret of the group, under the key ``secret``.
        tls: Name of a Secret with ``tls.crt``, ``tls.key`` and ``ca.crt``; empty for no TLS.
        restarts: How often the group is started again when a worker fails.
        master_port: The port at which the workers meet.
        user: User and group id of the workers.
        python: The interpreter in the image, for the probes.
        environment: Further variables.
        metrics: Where each worker serves its metrics; None if it does not.

    Raises:
        ConfigurationError: A value is invalid; says what would be right.
    """

    image: str
    command: Sequence[str]
    name: str
    workers: int
    namespace: str = ""
    names: Sequence[str] | None = None
    name_prefix: str = "worker"
    cpus: str = ""
    gpus: int = 0
    memory: str = ""
    shared_memory: str = "1Gi"
    secret: str = ""
    tls: str = ""
    restarts: int = 0
    master_port: int = 0
    user: int = 1000
    python: str = "python"
    environment: Mapping[str, str] = field(default_factory=dict)
    metrics: Address | None = None

    def __post_init__(self) -> None:
        worker_names(self.workers, self.names, self.name_prefix)
        if not self.image.strip():
            raise ConfigurationError(
                "there is no image; name one that has torch, torchweft and the script: --image "
                "registry.example/train:1"
            )
        if not _NAME.fullmatch(self.name) or len(self.name) > _LONGEST_NAME:
            raise ConfigurationError(
                f"the name {self.name!r} cannot be used; it has lower-case letters, digits and "
                f"'-', begins with a letter, and has at most {_LONGEST_NAME} characters"
            )
        for what in ("namespace", "secret", "tls"):
            text = getattr(self, what)
            if text and not _OBJECT_NAME.fullmatch(text):
                raise ConfigurationError(
                    f"{what} is {text!r}; names in Kubernetes have lower-case letters, digits, "
                    "'-' and '.'"
                )
        if self.cpus and not _CORES.fullmatch(self.cpus):
            raise ConfigurationError(f"cpus is {self.cpus!r}; write it like 4, 1.5 or 500m")
        for what in ("memory", "shared_memory"):
            text = getattr(self, what)
            if (text or what == "shared_memory") and not _BYTES.fullmatch(text):
                raise ConfigurationError(f"{what} is {text!r}; write it like 16Gi or 500M")
        for what, least in (("gpus", 0), ("restarts", 0), ("master_port", 0), ("user", 1)):
            number = getattr(self, what)
            if number < least:
                raise ConfigurationError(f"{what} is {number}; it must be at least {least}")
        for variable in self.environment:
            _check_variable(variable)
        if self.metrics is not None and is_loopback(self.metrics.host):
            raise ConfigurationError(
                f"metrics at {self.metrics} reach nobody outside of the pod; write --metrics "
                f"0.0.0.0:{self.metrics.port} for all addresses of the pod"
            )

    @property
    def secret_name(self) -> str:
        """Name of the Secret with the secret of the group."""
        return self.secret or f"{self.name}-secret"

    def worker_at(self, group: str, index: int) -> str:
        """Returns the worker's name of a pod, by its replicated job and completion index."""
        if self.names is None:
            return f"{self.name_prefix}{index}"
        return self.names[int(group.removeprefix("rank"))]


def _check_variable(name: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no name of an environment variable")
    if name in _RESERVED or name.startswith("PET_"):
        raise ConfigurationError(
            f"environment variable {name} is set for each pod, or from a Secret; leave it out"
        )
