"""The methods of ``torch.nn.Module`` that a remote module does not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from torchweft.errors import ConfigurationError

Class = TypeVar("Class", bound=type)

_ON_OWNER = "call it where the module is: get_module_rref().remote().{name}(...)"
_IN_CLASS = "do so in the class of the module, which is made on its owner"
_DEVICE = "name the device when the module is made: RemoteModule('worker/cuda:0', ...)"
_PARAMETERS = "remote_parameters() returns references to them"

ALTERNATIVES = {
    **dict.fromkeys(["parameters", "named_parameters", "get_parameter"], _PARAMETERS),
    **dict.fromkeys(["buffers", "named_buffers", "get_buffer"], "state_dict() has copies of them"),
    **dict.fromkeys(["children", "named_children", "get_submodule"], "its owner alone has them"),
    **dict.fromkeys(["register_parameter", "register_buffer"], _IN_CLASS),
    **dict.fromkeys(["add_module", "register_module"], _IN_CLASS),
    **dict.fromkeys(["to", "to_empty", "cuda", "cpu", "ipu", "xpu", "mtia"], _DEVICE),
    **dict.fromkeys(["type", "float", "double", "half", "bfloat16"], _ON_OWNER),
    **dict.fromkeys(["requires_grad_", "share_memory", "compile"], _ON_OWNER),
    **dict.fromkeys(["register_backward_hook", "register_full_backward_hook"], _IN_CLASS),
    "register_full_backward_pre_hook": _IN_CLASS,
    "zero_grad": "gradients are in autograd contexts, and each begins with none",
}
"""The alternative to each unsupported method, by its name."""


def refuse(alternatives: dict[str, str]) -> Callable[[Class], Class]:
    """Returns a class decorator that makes methods raise an error naming their alternative."""

    def decorate(decorated: Class) -> Class:
        for name, alternative in alternatives.items():
            setattr(decorated, name, _refusing(name, alternative.format(name=name)))
        return decorated

    return decorate


def _refusing(name: str, alternative: str) -> Callable[..., NoReturn]:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(
            f"Method ``{name}`` not supported for RemoteModule, whose module is on worker "
            f"{self.on!r}: {alternative}"
        )

    method.__name__ = name
    method.__qualname__ = f"RemoteModule.{name}"
    method.__doc__ = f"Raises ConfigurationError: {alternative}."
    return method
