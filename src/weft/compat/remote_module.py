"""The names of ``torch.distributed.nn.api.remote_module``, meaning Weft."""

from weft.nn import RemoteModule

_RemoteModule = RemoteModule

__all__ = ["RemoteModule"]

_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
