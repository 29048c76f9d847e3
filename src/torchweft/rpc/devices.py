"""Finds out which devices, networks and back ends of collectives a worker has."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed

_ARPHRD_INFINIBAND = "32"
_ACTIVE = "4: ACTIVE"


class Devices(NamedTuple):
    """What one worker has.

    Attributes:
        host: Name of its host.
        device: The device that it trains on: ``"cpu"`` or ``"cuda:0"``.
        backends: The back ends that its PyTorch has: of ``gloo``, ``nccl`` and ``mpi``.
        has_infiniband: Whether a port of InfiniBand is active.
        has_ip_over_infiniband: Whether a network interface runs over InfiniBand.
    """

    host: str
    device: str = "cpu"
    backends: tuple[str, ...] = ("gloo",)
    has_infiniband: bool = False
    has_ip_over_infiniband: bool = False


def find_devices(device: str | None = None, sys: Path = Path("/sys")) -> Devices:
    """Returns the devices of this worker; does not start CUDA.

    Args:
        device: The device that it trains on; by default the GPU that is current, if there is one.
        sys: Where the kernel shows its devices.
    """
    if device is None:
        is_started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        number = torch.cuda.current_device() if is_started else 0
        device = f"cuda:{number}" if torch.cuda.is_available() else "cpu"
    built = {
        "gloo": distributed.is_gloo_available(),
        "nccl": distributed.is_nccl_available(),
        "mpi": distributed.is_mpi_available(),
    }
    return Devices(
        socket.gethostname(),
        device,
        tuple(name for name, is_there in built.items() if is_there),
        any(_texts(sys, "class/infiniband/*/ports/*/state", _ACTIVE)),
        _has_ip_over_infiniband(sys),
    )


def _texts(sys: Path, pattern: str, wanted: str) -> Iterator[Path]:
    """Yields the files whose content is as wanted."""
    for path in sys.glob(pattern):
        try:
            if path.read_text().strip() == wanted:
                yield path
        except OSError:
            continue  # Some files of the kernel cannot be read by all users.


def _has_ip_over_infiniband(sys: Path) -> bool:
    for path in _texts(sys, "class/net/*/type", _ARPHRD_INFINIBAND):
        if any(_texts(path.parent, "operstate", "up")):
            return True
    return False
