"""Modules on other workers: ``RemoteModule``, and chains of calls that stay on the owner."""

from torchweft.nn.containers import local_parameters
from torchweft.nn.remote_module import Chain, RemoteModule

__all__ = ["Chain", "RemoteModule", "local_parameters"]
