"""Modules on other workers: ``RemoteModule``, and chains of calls that stay on the owner."""

from weft.nn.chain import Chain
from weft.nn.remote_module import RemoteModule

__all__ = ["Chain", "RemoteModule"]
