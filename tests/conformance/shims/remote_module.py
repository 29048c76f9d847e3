"""``torch.distributed.nn.api.remote_module`` with remote modules that TorchScript can compile."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tests.conformance.shims import scriptable
from torchweft.compat import remote_module
from torchweft.compat.remote_module import _REMOTE_MODULE_PICKLED_ATTRIBUTES
from torchweft.engine.codec.reducers import register_reducer
from torchweft.nn import owner
from torchweft.nn.remote_module import Chain
from torchweft.rpc import RRef

_interfaces: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


class _RemoteModule(remote_module.RemoteModule):
    """A remote module that takes ``_module_interface_cls``.

    That is a ``@torch.jit.interface`` with the module's ``forward``. The module is then scripted on
    its owner, and ``torch.jit.script`` accepts the remote module as well: scripted code calls it
    like any module that implements the interface.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        if _module_interface_cls is not None:
            scriptable.read_signature(_module_interface_cls)
            module_cls = functools.partial(_make_scripted, module_cls)
        super().__init__(remote_device, module_cls, args, kwargs)
        self._make_scriptable(_module_interface_cls)

    @classmethod
    def init_from_module_rref(
        cls, remote_device: str, module_rref: RRef[Any], _module_interface_cls: Any = None
    ) -> Any:
        """Returns a remote module, with that interface, for a module that exists already."""
        if _module_interface_cls is not None:
            scriptable.read_signature(_module_interface_cls)
        made: Any = super().init_from_module_rref(remote_device, module_rref)
        made._make_scriptable(_module_interface_cls)
        return made

    def _make_scriptable(self, interface: Any) -> None:
        if interface is not None:
            self.is_scriptable = True
            _interfaces[self] = interface

    def __prepare_scriptable__(self) -> nn.Module:
        """Returns the module that ``torch.jit.script`` compiles in place of this one."""
        if self not in _interfaces:
            super().__prepare_scriptable__()
        return scriptable.stand_in(_interfaces[self], Chain(self.module_rref, self.device))


RemoteModule = _RemoteModule


def _make_scripted(module_cls: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch.jit.script(owner.make(module_cls, args, kwargs, owner.HOST))


def _reduce(module: _RemoteModule) -> tuple[Any, ...]:
    # The interface is not sent: a class that is compiled here need not exist there.
    receiver, sent = remote_module._remote_module_reducer(module)
    place = _REMOTE_MODULE_PICKLED_ATTRIBUTES.index("is_scriptable")
    return receiver, (*sent[:place], False, *sent[place + 1 :])


register_reducer(_RemoteModule, _reduce)
