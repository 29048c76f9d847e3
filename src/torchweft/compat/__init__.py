"""Programs written for ``torch.distributed.rpc`` run on Weft, unchanged.

``install()`` makes ``torch.distributed.rpc``, ``torch.distributed.autograd`` and what belongs to
them Weft's, for this process and those that it starts; ``uninstall()`` puts everything back. From
the command line the same is ``python -m torchweft.compat script.py ...``, also under ``torchrun``.

The modules in here carry the names of PyTorch's, private ones too where programs use them:
``torchweft.compat.rpc`` can also be imported by itself.
"""

from torchweft.compat.installing import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
