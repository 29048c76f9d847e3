"""Provides the names of ``torch.distributed.nn.api.remote_module``, implemented by Weft.

The remote module of ``torchweft.nn`` can do more than PyTorch's. Methods that PyTorch refuses, and
that programs may expect to be refused, are refused here too, but only if the program itself calls
them: a larger module that contains a remote module still reaches it in ``train`` or
``state_dict``.
"""

# ruff: noqa: F401

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

import torchweft.nn
from torchweft.arguments import check_type
from torchweft.compat import rpc
from torchweft.compat.rpc import api
from torchweft.compat.rpc.internal import _internal_rpc_pickler
from torchweft.errors import ConfigurationError, SerializationError
from torchweft.nn import Chain
from torchweft.rpc import RRef, get_worker_info
from torchweft.rpc.torch_names import rebuilds_pickled, register_reducer

__all__ = ["RemoteModule"]


class _SerializedRemoteModule(NamedTuple):
    """The attributes of a remote module that are sent."""

    on: str
    device: str
    is_device_map_set: bool
    is_scriptable: bool
    generated_methods: Sequence[Callable[..., Any]]
    module_rref: RRef[nn.Module]


_REMOTE_MODULE_PICKLED_ATTRIBUTES = _SerializedRemoteModule._fields
_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING = (*vars(nn.Module()), "forward_async", "forward")
_GENERATED = (torchweft.nn.RemoteModule.forward_async, torchweft.nn.RemoteModule.forward)


def _refused(
    name: str,
    instead: str = "call it where the module is: get_module_rref().rpc_sync().{name}(...)",
) -> Any:
    """Returns a method that PyTorch refuses; it raises an error that names the alternative."""

    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(
            f"Method ``{name}`` not supported for RemoteModule: {instead.format(name=name)}"
        )

    method.__name__ = name
    return method


class RemoteModule(torchweft.nn.RemoteModule):
    """A module on another worker, with the interface of ``torch.distributed.nn.RemoteModule``.

    Args:
        remote_device: The worker, and the device there if it is not the CPU: ``"ps"``,
            ``"ps/cuda:0"``, ``"rank:1"``, ``"rank:1/cpu"``.
        module_cls: The class of the module, or a function that makes one on the owner.
        args: Positional arguments for it.
        kwargs: Keyword arguments for it.

    Attributes:
        is_device_map_set: Whether the options of ``init_rpc`` map devices for the worker.
        is_scriptable: Whether ``torch.jit.script`` accepts it: always False.
        generated_methods: The functions behind ``forward_async`` and ``forward``.

    Raises:
        ConfigurationError: An argument is invalid.
        RuntimeError: There is no such device.
        UnknownWorker: There is no such worker.
        Exception: The error that the constructor of the module raised.
    """

    is_device_map_set: bool
    is_scriptable: bool
    generated_methods: Sequence[Callable[..., Any]]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        _check_form(remote_device)
        super().__init__(remote_device, module_cls, args, kwargs)

    def __init_subclass__(cls) -> None:
        register_reducer(cls, _remote_module_reducer)

    @classmethod
    def init_from_module_rref(cls, remote_device: str, module_rref: RRef[Any]) -> RemoteModule:
        """Returns a remote module for an existing module.

        Args:
            remote_device: The worker that owns the module, and its device there. A worker other
                than the owner causes a warning, and has no effect.
            module_rref: A reference to the module.
        """
        _check_form(remote_device)
        worker, _, device = remote_device.partition("/")
        made = cls.from_module_rref(module_rref, device or "cpu")
        assert isinstance(made, RemoteModule)
        if worker not in (made.on, f"rank:{module_rref.owner().id}"):
            warnings.warn(
                f"remote_device {remote_device!r} names another worker than {made.on!r}, where "
                "the module is; the remote module calls it where it is",
                stacklevel=2,
            )
        return made

    def _bind(self, module_rref: RRef[nn.Module], device: str) -> None:
        super()._bind(module_rref, device)
        self.is_device_map_set = _has_device_map(self.on)
        self.is_scriptable = False
        self.generated_methods = _GENERATED
        self._install_generated_methods()

    def _install_generated_methods(self) -> None:
        # Not bound to this object: a reference cycle would keep it, with the RRef in it, alive
        # until the garbage collector runs.
        chain = Chain(self.module_rref, self.device)
        vars(self).update(forward_async=chain.forward_async, forward=chain)

    def __prepare_scriptable__(self) -> NoReturn:
        """Raises ConfigurationError to ``torch.jit.script``."""
        raise ConfigurationError(
            "this RemoteModule has no TorchScript interface; compiled code makes no remote calls: "
            "call the remote module from Python"
        )

    # PyTorch refuses these methods.

    apply = _refused("apply")
    load_state_dict = _refused("load_state_dict")
    requires_grad_ = _refused("requires_grad_")
    register_forward_hook = _refused("register_forward_hook")
    register_forward_pre_hook = _refused("register_forward_pre_hook")
    extra_repr = _refused("extra_repr", "repr() says where it is")

    # PyTorch refuses direct calls of these methods; a containing module may call them.

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Raises ConfigurationError, unless a module that contains this one calls it."""
        if args or destination is None:
            _raise_not_supported("state_dict")
        return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def parameters(self, recurse: bool = True) -> NoReturn:
        """Raises ConfigurationError: ``remote_parameters`` returns references to them."""
        raise ConfigurationError(
            "Method ``parameters`` not supported for RemoteModule. Please use "
            "``remote_parameters`` instead."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({torchweft.nn.RemoteModule.extra_repr(self)})"

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raises SerializationError, as PyTorch does."""
        self.__reduce__()

    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when "
            "using RPC; to keep what the module has learned, save the state_dict of "
            "get_module_rref().to_here()"
        )


def _raise_not_supported(name: str) -> NoReturn:
    raise ConfigurationError(f"Method ``{name}`` not supported for RemoteModule")


def _give_defaults() -> None:
    """Gives the class the attributes of ``nn.Module`` instances, which a received instance lacks.

    Nothing can be registered in a remote module, so its collections stay empty.
    """
    for name, value in vars(nn.Module()).items():
        setattr(RemoteModule, name, MappingProxyType(value) if isinstance(value, dict) else value)


_give_defaults()


def _check_form(remote_device: str) -> None:
    """Refuses what PyTorch refuses, with the error types and texts that programs may expect."""
    check_type(remote_device, str, "remote_device", "a string like 'worker' or 'worker/cuda:0'")
    worker, slash, device = remote_device.partition("/")
    if not worker or "/" in device:
        raise ConfigurationError(
            f"Could not parse remote_device: {remote_device}. The valid format is "
            "'<workername>/<device>' or 'rank:<rank>/<device>', the device may be left out"
        )
    if slash:
        torch.device(device)


def _has_device_map(worker: str) -> bool:
    agent = api._get_current_rpc_agent() if api._is_current_rpc_agent_set() else None
    # The agent of a back-end that a program registered may not support device maps.
    find = getattr(agent, "_get_device_map", None)
    return find is not None and bool(find(get_worker_info(worker)))


# Serialization


def _remote_module_reducer(module: RemoteModule) -> tuple[Any, ...]:
    known = {*_REMOTE_MODULE_PICKLED_ATTRIBUTES, *_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING}
    for name in vars(module).keys() - known:
        warnings.warn(
            f"The new attribute ``{name}`` of RemoteModule is ignored during RPC pickling: the "
            "receiver's remote module goes without",
            stacklevel=2,
        )
    sent = {name: getattr(module, name) for name in _REMOTE_MODULE_PICKLED_ATTRIBUTES}
    return _remote_module_receiver, (*sent.values(), module.training)


@rebuilds_pickled
def _remote_module_receiver(*attributes: Any) -> RemoteModule:
    """Makes a remote module from its sent attributes and its training mode."""
    count = len(_REMOTE_MODULE_PICKLED_ATTRIBUTES)
    sent = _SerializedRemoteModule(*attributes[:count])
    made = RemoteModule.__new__(RemoteModule)
    vars(made).update(sent._asdict())
    made._install_generated_methods()
    if attributes[count:] == (False,):
        made.training = False
    return made


register_reducer(RemoteModule, _remote_module_reducer)

_RemoteModule = RemoteModule
