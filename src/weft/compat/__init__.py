"""Programs written for ``torch.distributed.rpc`` run on Weft, unchanged.

``install()`` makes ``torch.distributed.rpc``, ``torch.distributed.autograd`` and what belongs to
them Weft's, for this process and those that it starts; ``uninstall()`` puts everything back. From
the command line the same is ``python -m weft.compat script.py ...``, also under ``torchrun``.

The modules in here carry the names of PyTorch's, private ones too where programs use them:
``weft.compat.rpc`` can also be imported by itself.
"""

from weft.compat.installing import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
