"""The functions of ``torch.distributed.rpc._utils``, which raise ``NotSupported``."""

from torchweft.compat.rpc import absent

__all__: list[str] = []

globals().update(absent.MEMBERSHIP)
