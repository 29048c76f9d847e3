"""Runs programs written for ``torch.distributed.rpc`` on Weft, unchanged.

``install()`` replaces ``torch.distributed.rpc``, ``torch.distributed.autograd`` and related names
by Weft's, in this process and the processes that it starts; ``uninstall()`` restores PyTorch's. On
the command line, ``python -m torchweft.compat script.py ...`` does the same, also under
``torchrun``.

The modules here provide PyTorch's names, including private names that programs use.
``torchweft.compat.rpc`` can also be imported by itself.
"""

from torchweft.compat.installing import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
