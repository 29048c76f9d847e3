"""Starts workers: many processes of one script, or a cluster around the calling program.

Importing this package does not import torch. So the command line answers at once, and workers of
``torchweft run`` that do not need torch start without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchweft.deferred import import_name
from torchweft.launch.clusters import Cluster
from torchweft.launch.launchers import Launcher, cluster
from torchweft.launch.nursery import Nursery
from torchweft.launch.restarts import RestartPolicy
from torchweft.launch.run import Order

if TYPE_CHECKING:
    from torchweft.launch.hosts import Host
    from torchweft.launch.hosts_launcher import HostsLauncher
    from torchweft.launch.kubernetes import Kubernetes
    from torchweft.launch.ray import Ray
    from torchweft.launch.slurm import Slurm
    from torchweft.launch.ssh import Ssh

__all__ = [
    "Cluster",
    "Host",
    "HostsLauncher",
    "Kubernetes",
    "Launcher",
    "Nursery",
    "Order",
    "Ray",
    "RestartPolicy",
    "Slurm",
    "Ssh",
    "cluster",
]

_BY_NEED = {
    "Host": "hosts",
    "HostsLauncher": "hosts_launcher",
    "Kubernetes": "kubernetes",
    "Ray": "ray",
    "Slurm": "slurm",
    "Ssh": "ssh",
}
"""What only runs over hosts need, by module."""


def __getattr__(name: str) -> Any:
    if name not in _BY_NEED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_name(__name__, name, f"{__name__}.{_BY_NEED[name]}")
