"""The stand-in that ``torch.jit.script`` compiles for a remote module that has an interface.

TorchScript knows no remote calls. It does call Python functions that are marked for that and have
type annotations. So the stand-in's methods have the types of the interface's ``forward`` and leave
the call to Python. The compiler reads the source of the code that it compiles: the stand-in's
source is made from the interface and kept where ``inspect`` looks for it.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import typing
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from torchweft.errors import ArgumentTypeError, ReferenceGone
from torchweft.nn.remote_module import Chain
from torchweft.rpc import Future

_SOURCE = """\
class StandIn(nn.Module):
    __jit_ignored_attributes__ = ["calls"]

    def __init__(self, calls):
        super().__init__()
        self.calls = calls
        self.number = calls.number

    def forward(self, {parameters}) -> {result}:
        return self._call({names})

    @torch.jit.export
    def forward_async(self, {parameters}) -> Future[{result}]:
        return torch.jit._fork(self._finish, self._start({names}))

    @torch.jit.ignore
    def _call(self, {parameters}) -> {result}:
        return calls_of(self.number).call({names})

    @torch.jit.ignore
    def _start(self, {parameters}) -> int:
        return calls_of(self.number).start({names})

    @torch.jit.ignore
    def _finish(self, call: int) -> {result}:
        return finish(call)

    @torch.jit.export
    def __getstate__(self) -> Tuple[int]:
        raise RuntimeError("{refusal}")
        return (0,)

    @torch.jit.export
    def __setstate__(self, state: Tuple[int]) -> None:
        raise RuntimeError("{refusal}")
"""

_REFUSAL = (
    "Passing a script RemoteModule over RPC is not supported. Send its module_rref, and have the "
    "receiver call RemoteModule.init_from_module_rref. RemoteModule can only be pickled when "
    "using RPC, and only before torch.jit.script"
)


class Signature(NamedTuple):
    """The ``forward`` of an interface, as source text.

    Attributes:
        parameters: The parameters after ``self`` with types and defaults.
        names: Their names.
        result: The type of the result.
    """

    parameters: str
    names: str
    result: str


class _Calls:
    """The calls of a compiled stand-in.

    Python methods that compiled code calls see only those parts of the stand-in that compiled code
    can hold: no Python object, but a number that leads to this object.
    """

    def __init__(self, chain: Chain) -> None:
        self.call = chain
        self.number = next(_numbers)
        _all_calls[self.number] = self  # The stand-in holds it, so it ends with the stand-in.

    def start(self, *args: Any) -> int:
        # On the calling thread, because the autograd context belongs to that thread.
        number = next(_numbers)
        _started[number] = self.call.forward_async(*args)
        return number


_numbers = itertools.count()
_all_calls: weakref.WeakValueDictionary[int, _Calls] = weakref.WeakValueDictionary()
_started: dict[int, Future[Any]] = {}
"""The calls that compiled code has made and not waited for yet."""


def _calls_of(number: int) -> _Calls:
    calls = _all_calls.get(number)
    if calls is None:
        raise ReferenceGone(
            "the scripted RemoteModule that made this one is gone, and its reference with it; "
            "keep what torch.jit.script returned"
        )
    return calls


def _finish(number: int) -> Any:
    return _started.pop(number).wait()


def read_signature(interface: Any) -> Signature:
    """Returns the signature of an interface's ``forward``.

    Raises:
        ArgumentTypeError: It is not a ``@torch.jit.interface``, or has no ``forward``.
    """
    if not getattr(interface, "__torch_script_interface__", False):
        raise ArgumentTypeError(
            f"_module_interface_cls is {interface!r}; pass a class with @torch.jit.interface"
        )
    compiled: Any = torch.jit._state._python_cu.get_interface(
        torch._jit_internal._qualified_name(interface)
    )
    if "forward" not in compiled.getMethodNames():
        raise ArgumentTypeError(
            f"the interface {interface.__name__} has no method forward; declare the module's"
        )
    schema = compiled.getMethod("forward")
    arguments = schema.arguments[1:]
    return Signature(
        ", ".join(map(_parameter, arguments)),
        ", ".join(argument.name for argument in arguments),
        schema.returns[0].type.annotation_str,
    )


def _parameter(argument: Any) -> str:
    text = f"{argument.name}: {argument.type.annotation_str}"
    return f"{text} = {argument.default_value!r}" if argument.has_default_value() else text


def stand_in(interface: Any, chain: Chain) -> nn.Module:
    """Returns a module to be compiled, whose ``forward`` and ``forward_async`` call a chain.

    Raises:
        ArgumentTypeError: The interface has types that only its own program knows.
    """
    made: nn.Module = _stand_in_class(read_signature(interface))(_Calls(chain))
    return made


@functools.lru_cache(maxsize=256)
def _stand_in_class(signature: Signature) -> Any:
    source = _SOURCE.format(**signature._asdict(), refusal=_REFUSAL)
    name = f"<weft remote module ({signature.parameters}) -> {signature.result}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    known = {key: getattr(typing, key) for key in ("Any", "Dict", "List", "Optional", "Tuple")}
    namespace: dict[str, Any] = {
        **known,
        "Union": typing.Union,
        "calls_of": _calls_of,
        "finish": _finish,
        "Future": torch.futures.Future,
        "Tensor": torch.Tensor,
        "nn": nn,
        "torch": torch,
        "__name__": __name__,
    }
    try:
        exec(compile(source, name, "exec", dont_inherit=True), namespace)
    except NameError as error:
        raise ArgumentTypeError(
            f"an interface with forward({signature.parameters}) -> {signature.result} cannot be "
            f"called remotely from TorchScript: {error}; use tensors, numbers, strings, and "
            "lists, dicts and tuples of them, or call the remote module from Python"
        ) from error
    return namespace["StandIn"]
