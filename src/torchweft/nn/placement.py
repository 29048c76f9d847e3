"""Reads the placement of a remote module: a worker, and a device there."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchweft.arguments import kind_of
from torchweft.errors import ArgumentTypeError, ConfigurationError

FORMS = "'worker', 'worker/cuda:0', 'rank:1' or 'rank:1/cuda:0'"
_RANK = "rank:"


class Placement(NamedTuple):
    """A worker, by name or by rank, and the name of a device there."""

    worker: str | int
    device: str


def read_placement(remote_device: object) -> Placement:
    """Parses a ``remote_device``; the default device is the CPU.

    Raises:
        ConfigurationError: It has none of the accepted forms.
    """
    if not isinstance(remote_device, str):
        raise ArgumentTypeError(
            f"remote_device is {kind_of(remote_device)}; pass a string like {FORMS}"
        )
    worker, slash, device = remote_device.rpartition("/")
    if not slash:
        worker, device = remote_device, "cpu"
    if not worker:
        raise ConfigurationError(f"remote_device {remote_device!r} names no worker; pass {FORMS}")
    return Placement(_read_worker(worker, remote_device), _read_device(device, remote_device))


def _read_worker(worker: str, remote_device: str) -> str | int:
    if not worker.startswith(_RANK):
        return worker
    rank = worker.removeprefix(_RANK)
    if not rank.isdecimal():
        raise ConfigurationError(
            f"{rank!r} in remote_device {remote_device!r} is no rank; pass {FORMS}"
        )
    return int(rank)


def _read_device(device: str, remote_device: str) -> str:
    try:
        return str(torch.device(device))
    except RuntimeError:
        raise ConfigurationError(
            f"{device!r} in remote_device {remote_device!r} is no device; pass {FORMS}"
        ) from None
