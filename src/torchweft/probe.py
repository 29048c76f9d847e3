"""What this process is and may use: its host, its namespaces, its devices.

Two workers exchange these facts when they connect and decide from them how memory can travel
between them. Everything here is a plain value that survives JSON, and is read from the system
without touching a device: nothing is initialised, and no torch is imported. A fact the system
does not tell is empty or 0, and equals nobody else's.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchweft.errors import ProtocolError

LOAD = "/proc/loadavg"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = Path("/proc/self/ns")
NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")
RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Facts:
    """What one process can do.

    Attributes:
        boot_id: Names one boot of one kernel; empty where the system has none.
        hostname: As the process sees it; containers of one host differ.
        pid: In the process's own namespace.
        uid: Effective user id; -1 where there are no users.
        net_namespace: Inode of the network namespace, or 0.
        pid_namespace: Inode of the process id namespace, or 0.
        ipc_namespace: Inode of the namespace of System V memory and queues, or 0.
        cpu_count: Cores this process may run on.
        cuda_devices: Identifiers of the NVIDIA devices, in the driver's order.
        cuda_visible: ``CUDA_VISIBLE_DEVICES`` as set for this process, or None.
        rdma_devices: Names of the RDMA devices.
    """

    boot_id: str
    hostname: str
    pid: int
    uid: int
    net_namespace: int
    pid_namespace: int
    ipc_namespace: int
    cpu_count: int
    cuda_devices: tuple[str, ...]
    cuda_visible: str | None
    rdma_devices: tuple[str, ...]

    @property
    def host_id(self) -> str:
        """Names the host, as far as this process can tell hosts apart."""
        return f"{self.boot_id}/{self.hostname}"

    def as_json(self) -> dict[str, object]:
        """Returns the facts as a dictionary that JSON can carry."""
        plain = dataclasses.asdict(self)
        return {name: list(v) if isinstance(v, tuple) else v for name, v in plain.items()}

    @classmethod
    def from_json(cls, data: object) -> Facts:
        """Reads what ``as_json`` wrote.

        Raises:
            ProtocolError: A fact is missing or has the wrong type.
        """
        if not isinstance(data, dict):
            raise ProtocolError(f"facts about a process are a {type(data).__name__}, not an object")
        fields: dict[str, Any] = {
            name: _checked(name, kind, data.get(name)) for name, kind in _KINDS.items()
        }
        return cls(**fields)


_KINDS: dict[str, str] = {field.name: str(field.type) for field in dataclasses.fields(Facts)}


def _checked(name: str, kind: str, value: object) -> object:
    match kind, value:
        case ("int", int()) | ("str" | "str | None", str()) | ("str | None", None):
            return value
        case ("tuple[str, ...]", list()) if all(isinstance(item, str) for item in value):
            return tuple(value)
    raise ProtocolError(f"a process describes its {name} as {value!r}, which is no {kind}")


def network_id() -> str:
    """Names the network stack of this process: where loopback leads. Empty if not known.

    Processes in containers of one host may have one each.
    """
    boot_id, namespace = _read_text(BOOT_ID), _inode(NAMESPACES / "net")
    return f"{boot_id}/{namespace}" if boot_id else ""


def read_facts() -> Facts:
    """Reads the facts about this process as they are now; call it again after a fork."""
    return Facts(
        boot_id=_read_text(BOOT_ID),
        hostname=socket.gethostname(),
        pid=os.getpid(),
        uid=os.geteuid() if hasattr(os, "geteuid") else -1,
        net_namespace=_inode(NAMESPACES / "net"),
        pid_namespace=_inode(NAMESPACES / "pid"),
        ipc_namespace=_inode(NAMESPACES / "ipc"),
        cpu_count=len(usable_cores()),
        cuda_devices=cuda_devices(NVIDIA_DEVICES),
        cuda_visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        rdma_devices=_entries(RDMA_DEVICES),
    )


def usable_cores() -> frozenset[int]:
    """Returns the cores that the calling thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cuda_devices(root: Path) -> tuple[str, ...]:
    """Returns the identifiers of the devices that the NVIDIA driver lists under ``root``.

    The driver's files are read, not its library: that one would start a context in a process
    that may still fork.
    """
    found = []
    for device in _entries(root):
        for line in _read_text(root / device / "information").splitlines():
            label, _, value = line.partition(":")
            if label.strip() == "GPU UUID":
                found.append(value.strip())
    return tuple(found)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _entries(path: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(path)))
    except OSError:
        return ()


def running_threads() -> int:
    """Counts the threads of the machine that run or wait for a core, this one included.

    0 where the system does not say. It takes about 10 us.
    """
    try:
        descriptor = os.open(LOAD, os.O_RDONLY)
        try:
            text = os.read(descriptor, 64)
        finally:
            os.close(descriptor)
        return int(text.split()[3].partition(b"/")[0])
    except (OSError, ValueError, IndexError):
        return 0
