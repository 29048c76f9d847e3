"""Modules on other workers: ``RemoteModule``, and chains of calls that stay on the owner."""

from torchweft.nn.remote_module import Chain, RemoteModule, local_modules, local_parameters

__all__ = ["Chain", "RemoteModule", "local_modules", "local_parameters"]
