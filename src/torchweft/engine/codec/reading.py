"""How a worker reads messages: anything, names that an allow-list admits, or plain values only.

All incoming data passes a ``Reader``, which is chosen once, when the worker starts. So a worker
without restrictions pays nothing for them.

A name leads to code in three ways: as the function of a call, as a global in a pickle, and as a
method of a value behind a reference. For an allow-list, a prefix test on the module would stop none
of them. ``my_program:os.system`` begins in an allowed module. So does ``my_program:system`` if that
module has the line ``from os import system``. So a name is followed step by step:

1. The module must be on the list before it is imported.
2. All parts between the module and the last part of the name must be classes of allowed modules;
   never a module or another object, whose attributes lead anywhere.
3. The object found must have been defined in an allowed module. A plain object does not say where;
   it belongs to the module that it was found in.

No entry is needed for what ``registry`` lists: the entry points of Weft, and functions and classes
that only make a value. A list guards against mistakes, not against attackers. A strict worker
guards against both: it reads no pickles, and follows only registered names.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from torchweft.engine.codec import (
    by_value,
    exceptions,
    functions,
    makers,
    objects,
    registry,
    values,
)
from torchweft.engine.codec.functions import (
    describe,
    import_module,
    resolve,
    text_of,
    unknown,
    without_alias,
)
from torchweft.engine.codec.registry import EXPOSE, REGISTER
from torchweft.errors import NotAllowed, UnknownFunction


class Reader:
    """Turns messages into objects; this class reads everything that the workers of a group send.

    Attributes:
        is_restricted: Whether it refuses anything.
        is_strict: Whether it refuses all pickles.
        resolve: Returns the function with a name that is called.
        resolve_value: Returns the function or class with a name that is a value.
        make: Makes an object of a name and arguments; see ``makers``.
        method_of: Returns the method of a value of this worker that another worker asks for.
        unpack: Does the same as ``objects.unpack``.
        unpack_error: Does the same as ``exceptions.unpack_error``.
    """

    is_restricted = False
    is_strict = False
    resolve: Callable[[bytes], Any] = staticmethod(functions.resolve)
    resolve_value: Callable[[bytes], Any] = staticmethod(functions.resolve)
    make: Callable[[bytes, object], Any] = staticmethod(makers.made_of)
    method_of: Callable[[Any, str], Any] = staticmethod(getattr)
    unpack: Callable[..., Any] = staticmethod(objects.unpack)
    unpack_error: Callable[[Any], BaseException] = staticmethod(exceptions.unpack_error)

    def check_called(self, function: Any) -> None:
        """Raises NotAllowed if a function that a message contains may not be called."""


TRUSTING = Reader()


def make_reader(
    allowed: Iterable[str] | None, is_strict: bool, worker: str, callables: Iterable[Any] = ()
) -> Reader:
    """Returns the reader for the options of a worker.

    Args:
        allowed: Modules whose functions and classes may be used; None for all. Not for a strict
            worker.
        is_strict: Whether pickles are refused, and functions that are not registered.
        worker: Name of the worker, for error messages.
        callables: Functions and classes that a strict worker registers beside the program's.

    Raises:
        ArgumentTypeError: One of ``callables`` cannot be called by others.
    """
    if is_strict:
        return StrictNames(callables, worker)
    return TRUSTING if allowed is None else AllowList(allowed, worker)


class _Restricted(Reader):
    """Base class of the readers with restrictions, each of which replaces every method."""

    is_restricted = True

    def __init__(self, worker: str) -> None:
        self._worker = worker

    def find_global(self, module: str, path: str) -> Any:
        """Returns the object that a global in a pickle, or in the record of an error, names."""
        raise NotImplementedError

    def unpack(
        self,
        payload: bytes | bytearray | memoryview,
        tensors: Sequence[Tensor],
        externals: Sequence[object],
        come_home: Any = values.refuse_home,
    ) -> Any:
        """Returns the object in a message, or raises NotAllowed."""
        if not payload:
            return tensors[0] if tensors else None
        if payload[0] != values.PICKLE:
            limit_bytes = values.limit_of_repetition(len(payload), tensors)
            return values.decode(
                payload, tensors, externals, self.resolve_value, come_home, limit_bytes, self.make
            )
        return self._unpickle(payload, tensors, externals)

    def _unpickle(self, payload: Any, tensors: Any, externals: Any) -> Any:
        raise NotImplementedError

    def unpack_error(self, content: bytes | bytearray | memoryview) -> BaseException:
        """Returns the error in a message, of the nearest type that is allowed."""
        return exceptions.unpack_error(
            content, find=self.find_global, unpack=self.unpack, is_bounded=True
        )


# Pickles for an allow-list
#
# C code cannot read them: a pickle can also change objects that it names (``BUILD`` on a class sets
# its attributes), and only the Python unpickler allows refusing that. It costs some microseconds
# for a usual message.
#
# numpy trusts a pickle with its memory. An array of objects that is made of bytes takes them for
# addresses. The state of a dtype can say that it has no objects, although it has. Setting the state
# of an array that already has memory frees that memory under its views. So no pickle may set a
# state of numpy's: Weft's own reducers take arrays, scalars and dtypes apart.


class AllowingUnpickler(pickle._Unpickler):  # type: ignore[misc, name-defined, unused-ignore]
    """Reads a pickle that names only objects that an allow-list admits, and changes none of them.

    Args:
        payload: The pickle, made by ``objects.pack``.
        tensors: The tensors taken out of it.
        externals: The other objects taken out of it.
        find: Returns the object that a global names here, or raises NotAllowed.
    """

    def __init__(
        self,
        payload: bytes | bytearray | memoryview,
        tensors: Sequence[Tensor],
        externals: Sequence[object],
        find: Callable[[str, str], Any],
    ) -> None:
        super().__init__(io.BytesIO(payload))
        self._taken_out = {
            **objects.taken_out(tensors, externals),
            (functions.__name__, functions.resolve.__name__): self._find_named,
        }
        self._find = find
        self._named: dict[int, object] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Returns the object that a global names here, or raises NotAllowed."""
        name = (module_name, global_name)
        found = self._taken_out.get(name)
        if found is None:
            found = self._find(module_name, global_name)
        self._named[id(found)] = found
        return found

    def _find_named(self, name: bytes) -> Any:
        return self.find_class(*name.decode().split(":", 1))

    def get_extension(self, code: int) -> None:
        """Refuses a number that stands for a global."""
        raise pickle.UnpicklingError(f"a pickle has the extension code {code}")

    def check_changed(self, target: object) -> None:
        """Raises UnpicklingError if a pickle would change an object that it only names."""
        kinds = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
        if isinstance(target, (np.ndarray, np.dtype, np.generic)):
            raise pickle.UnpicklingError(
                "a pickle would set a state of numpy's, as of an array with fields; send a dict "
                "of arrays instead"
            )
        if id(target) in self._named or isinstance(target, kinds):
            raise pickle.UnpicklingError(f"a pickle would change {target!r}, which it only names")


def _guarded(read: Callable[[Any], None], target: Callable[[Any], object]) -> Callable[..., None]:
    def read_guarded(unpickler: Any) -> None:
        unpickler.check_changed(target(unpickler))
        read(unpickler)

    return read_guarded


def _read_bytearray(unpickler: Any) -> None:
    """Reads a bytearray; takes memory for the bytes present, not for the announced size."""
    size_bytes = int.from_bytes(unpickler.read(8), "little")
    content = unpickler.read(size_bytes)
    if len(content) < size_bytes:
        raise pickle.UnpicklingError("a bytearray in a pickle is cut short")
    unpickler.append(bytearray(content))


def _below_mark(unpickler: Any) -> object:
    return unpickler.metastack[-1][-1]


_TARGETS: dict[bytes, Callable[[Any], object]] = {
    pickle.BUILD: lambda unpickler: unpickler.stack[-2],
    pickle.APPEND: lambda unpickler: unpickler.stack[-2],
    pickle.SETITEM: lambda unpickler: unpickler.stack[-3],
    pickle.APPENDS: _below_mark,
    pickle.SETITEMS: _below_mark,
    pickle.ADDITEMS: _below_mark,
}
"""The instructions that change an object, and where they find it."""

AllowingUnpickler.dispatch = {
    **AllowingUnpickler.dispatch,
    pickle.BYTEARRAY8[0]: _read_bytearray,
    **{
        code[0]: _guarded(AllowingUnpickler.dispatch[code[0]], target)
        for code, target in _TARGETS.items()
    },
}


# An allow-list

BY_THEMSELVES = tuple(
    f"torchweft.{name}"
    for name in "checkpoint embedding hybrid observe.doctor pipeline rl weights".split()
)
"""Parts of Weft that need an entry, since other workers tell them which files to write, or which
modules and environments to make."""

_OPTION = "RpcBackendOptions(allowed_modules=...) or WEFT_ALLOWED_MODULES"

_DEFINED: tuple[type, ...] = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)
"""Types of objects that say where they were defined; any other object is a plain object."""

_TENSOR_CLASSES: tuple[type, ...] = (torch.Tensor, torch._C.TensorBase)
_TENSOR_BASE = "TensorBase"
_OPERATORS = "torch.ops"
_OPERATOR_TYPES = (OpOverload, OpOverloadPacket)


class AllowList(_Restricted):
    """The names that one worker follows in messages of others. Thread-safe.

    Args:
        modules: Modules that may be used, with all their submodules.
        worker: Name of this worker, for error messages.
    """

    def __init__(self, modules: Iterable[str], worker: str) -> None:
        entries = {without_alias(module) for module in modules}
        self._has_torch = registry.TORCH in entries
        if self._has_torch:
            entries = entries - {registry.TORCH} | registry.TORCH_PARTS
        super().__init__(worker)
        self._entries = frozenset(entries)

    # Names

    def resolve(self, name: bytes) -> Any:
        """Returns the function or class for a name that ``name_of`` returned on another worker.

        Raises:
            NotAllowed: It may not be used here.
            UnknownFunction: This worker does not have that name.
        """
        text = text_of(name)
        if (
            registry.remotely_callable.has(text)
            or registry.remotely_callable_unless_strict.has(text)
            or text in registry.SAFE
            or registry.is_error(text)
        ):
            return resolve(name)
        return self._found(*self._locate(text), text)

    resolve_value = resolve

    def find_global(self, module: str, path: str) -> Any:
        """Returns the object that a global in a pickle, or in the record of an error, names.

        Raises:
            NotAllowed: It may not be used here.
            UnknownFunction: This worker does not have that name.
        """
        text = f"{without_alias(module)}:{path}"
        if (
            registry.rebuilds_plain.has(text)
            or registry.rebuilds_pickled.has(text)
            or registry.is_weft_error(text)
        ):
            return resolve(text.encode())
        if registry.loads_script.has(text):
            if self._is_allowed("torch.jit"):
                return resolve(text.encode())
            self._refuse(
                text,
                "TorchScript is a program by itself; have this worker load it from a file, or "
                "add 'torch.jit' to",
            )
        if module == registry.TORCH:
            constant = getattr(torch, path, None)
            if isinstance(constant, (torch.dtype, torch.layout, torch.memory_format)):
                return constant
        if module.partition(".")[0] == "cloudpickle" or module == by_value.__name__:
            self._refuse(
                "a function or class that travels by value",
                "define it at the top level of a module that this worker can import, and add that "
                "module to",
            )
        return self.resolve(text.encode())

    def _unpickle(self, payload: Any, tensors: Any, externals: Any) -> Any:
        unpickler = AllowingUnpickler(payload, tensors, externals, self.find_global)
        try:
            return unpickler.load()
        except Exception as error:
            raise by_value.not_rebuilt(error)  # noqa: B904

    def _locate(self, text: str) -> tuple[object, str]:
        """Returns the object with the named object as an attribute, and the attribute's name."""
        module, separator, path = text.partition(":")
        parts = path.split(".")
        if not separator or not all(map(str.isidentifier, (*module.split("."), *parts))):
            raise UnknownFunction(f"{text!r} is no name of a function; it should be module:name")
        if any(_is_hidden(part) for part in parts):
            self._refuse(text, "no such name may be used from another worker, whatever is on")
        if module == registry.TORCH and parts[0] == "ops":
            return self._locate_operator(text, parts)
        is_tensor_method = module == "torch._C" and parts[0] == _TENSOR_BASE and len(parts) == 2
        is_torch = self._has_torch and (module == registry.TORCH or is_tensor_method)
        if not is_torch and not self._is_allowed(module):
            self._refuse(text, _to_add(module))
        parent: object = import_module(module, path)
        for part in parts[:-1]:
            parent = self._attribute(parent, part, text)
            if not isinstance(parent, type) or not self._may_use(parent):
                self._refuse(text, f"{part!r} is no class of an allowed module; see")
        return parent, parts[-1]

    def _locate_operator(self, text: str, parts: list[str]) -> tuple[object, str]:
        if not self._is_allowed(_OPERATORS):
            self._refuse(text, f"add {_OPERATORS!r} to")
        parent: object = torch.ops
        for part in parts[1:-1]:
            parent = self._attribute(parent, part, text)
        found = self._attribute(parent, parts[-1], text)
        if not isinstance(found, _OPERATOR_TYPES):
            self._refuse(text, "that is no operator of torch; see")
        return parent, parts[-1]

    def _found(self, parent: object, attribute: str, text: str) -> Any:
        found = self._attribute(parent, attribute, text)
        if not self._belongs(found):
            home = _home_of(found)
            whose = "a module" if isinstance(found, types.ModuleType) else f"of module {home!r}"
            self._refuse(f"{text}, which is {whose}", _to_add(home))
        return found

    def _attribute(self, parent: object, name: str, text: str) -> Any:
        try:
            return getattr(parent, name)
        except (AttributeError, RuntimeError) as error:  # RuntimeError: no such operator
            module, _, path = text.partition(":")
            raise unknown(module, path, str(error)) from None

    # Methods

    def method_of(self, value: Any, name: str) -> Any:
        """Returns a method of a value of this worker that another worker may call.

        Raises:
            NotAllowed: Other workers may not call it.
            AttributeError: There is no method of that name.
        """
        kind = value if isinstance(value, type) else type(value)
        text = f"method {name!r} of a {kind.__module__}.{kind.__qualname__}"
        if type(name) is not str or _is_hidden(name, single=True):
            self._refuse(text, "no such method may be called by another worker, whatever is on")
        if isinstance(value, types.ModuleType):
            self._refuse(text, "no module may be reached by a reference, whatever is on")
        if name == "__call__":
            self._check_called(value, text)
            return getattr(value, name)
        home = next((base for base in kind.__mro__ if name in vars(base)), None)
        if home is None:  # An attribute of the object itself, or made by its class on access.
            self._check_class(kind, text)
        elif not _is_tame(home):
            self._check_class(home, text)
            self._check_belongs(vars(home)[name], text)
        elif (home, name) in registry.REFUSED_METHODS:
            self._refuse(text, "call a function that does it; see")
        found = getattr(value, name)
        if home is None or not _is_tame(home):
            self._check_belongs(found, text)  # A property may have returned anything.
        return found

    def _check_called(self, value: object, text: str) -> None:
        if isinstance(_unwrapped(value), _DEFINED):
            self._check_belongs(value, text)
        else:
            self._check_class(type(value), text)

    def _check_class(self, kind: type, text: str) -> None:
        if not self._may_use(kind) and not _is_tame(kind):
            self._refuse(f"{text}, which {kind.__module__} defines", _to_add(kind.__module__))

    def _check_belongs(self, found: object, text: str) -> None:
        if not self._belongs(found):
            home = _home_of(found)
            self._refuse(f"{text}, which {home} defines", _to_add(home))

    # What belongs

    def _is_allowed(self, module: str) -> bool:
        module = without_alias(module)
        below = ""
        while module:
            if module in self._entries:
                # The entry "torch" leaves out torch's private modules: they compile and write.
                is_part = self._has_torch and module in registry.TORCH_PARTS
                return not (is_part and "._" in below)
            module, _, name = module.rpartition(".")
            below = f".{name}{below}"
        return False

    def _may_use(self, kind: type) -> bool:
        return self._is_allowed(kind.__module__) or (self._has_torch and kind in _TENSOR_CLASSES)

    def _belongs(self, found: object) -> bool:
        """Whether an object was defined in an allowed module, as far as the object says where."""
        if isinstance(found, types.ModuleType):
            return False
        home = _home_of(found)
        if home is None or self._is_allowed(home):
            return True
        if isinstance(found, _OPERATOR_TYPES):
            return self._is_allowed(_OPERATORS)
        if not self._has_torch:
            return False
        found = _unwrapped(found)
        if getattr(found, "__objclass__", None) is torch._C.TensorBase:
            return True
        return registry.is_operator(found) or any(found is kind for kind in _TENSOR_CLASSES)

    def _refuse(self, what: str, advice: str) -> NoReturn:
        raise NotAllowed(
            f"worker {self._worker!r} does not allow {registry.shortened(what)}: {advice} its "
            f"allowed modules ({_OPTION})",
            worker=self._worker,
            refused=what,
        )


def is_part_of_weft(module: str) -> bool:
    """Tells whether a module is Weft's own."""
    return _is_below(module, "torchweft")


def _is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _is_hidden(name: str, *, single: bool = False) -> bool:
    return name.startswith("_" if single else "__") and name not in registry.USUAL_DUNDERS


def _is_tame(kind: type) -> bool:
    """Whether methods of a class do no more than their names say, for any caller."""
    if kind in registry.METHOD_CLASSES or kind.__module__.startswith("torch.nn.modules."):
        return True
    name = f"{kind.__module__}:{kind.__qualname__}"
    return name in registry.METHOD_NAMES or registry.has_callable_methods.has(name)


def _unwrapped(found: Any) -> Any:
    """Returns the function that a method, partial or descriptor of a class calls."""
    while True:
        if isinstance(found, functools.partial):
            found = found.func
        elif isinstance(found, (types.MethodType, staticmethod, classmethod)):
            found = found.__func__
        elif isinstance(found, property):
            found = found.fget
        else:
            return found


def _home_of(found: object) -> str | None:
    """Returns the module where a function or class was defined; None for a plain object."""
    found = _unwrapped(found)
    home = getattr(found, "__module__", None)
    if isinstance(found, _DEFINED):
        if not isinstance(home, str):
            home = _home_of_method(found)
        return home
    if isinstance(home, str) and home != type(found).__module__:
        return home  # A wrapper that has taken the name of its function.
    return None


def _home_of_method(found: Any) -> str | None:
    kind = getattr(found, "__objclass__", None)
    if kind is None:
        # Of a method in C: the class, or the object, that it is bound to.
        bound_to = getattr(found, "__self__", None)
        if isinstance(bound_to, types.ModuleType):
            return bound_to.__name__
        kind = bound_to if isinstance(bound_to, type) else None
    return kind.__module__ if isinstance(kind, type) else None


def _to_add(module: str | None) -> str:
    if module is not None and is_part_of_weft(module):
        module = next((each for each in BY_THEMSELVES if _is_below(module, each)), None)
    if module is None or module == "builtins":
        return "call a function of an allowed module that does what you need; see"
    return f"add {module!r} to"


# Names that are registered one by one


class StrictNames(_Restricted):
    """The names that one strict worker follows in messages of others. Thread-safe.

    Args:
        members: Functions and classes that this worker registers beside the program's.
        worker: Name of this worker, for error messages.
    """

    def __init__(self, members: Iterable[Any], worker: str) -> None:
        super().__init__(worker)
        self._own = registry.Callables(members)

    is_strict = True
    make = staticmethod(makers.made_plainly)

    def resolve(self, name: bytes) -> Any:
        """Returns the function that a call names.

        Raises:
            NotAllowed: It is not registered here.
        """
        found = self._find(name)
        if found is None and registry.remotely_callable.has(text_of(name)):
            found = resolve(name)
        return self._refuse_name(name) if found is None else found

    def resolve_value(self, name: bytes) -> Any:
        """Returns a function or class that arguments, results or errors contain.

        Raises:
            NotAllowed: It is neither registered here nor a class of errors of Python or Weft.
        """
        found, text = self._find(name), text_of(name)
        if found is None and (registry.is_error(text) or registry.is_weft_error(text)):
            found = resolve(name)
        return self._refuse_name(name) if found is None else found

    def find_global(self, module: str, path: str) -> Any:
        """Returns the class of errors that a record of an error names.

        Raises:
            NotAllowed: It is neither registered here nor one of Python or Weft.
        """
        return self.resolve_value(f"{without_alias(module)}:{path}".encode())

    def check_called(self, function: Any) -> None:
        """Raises NotAllowed if a function that a message contains may not be called."""
        if not (self._own.has(function) or registry.registered.has(function)):
            self._refuse_name(describe(function).encode(errors="backslashreplace"))

    def method_of(self, value: Any, name: str) -> Any:
        """Returns a method of a value of this worker that another worker may call.

        Raises:
            NotAllowed: The class of the value does not declare it.
        """
        kind = type(value)
        home = next((base for base in kind.__mro__ if name in vars(base)), None)
        # No getattr: the value and its class may have code for attribute access.
        if home is not None and registry.is_exposed(vars(home)[name]):
            return vars(home)[name].__get__(value, kind)
        self._refuse(
            f"method {name!r} of a {kind.__module__}.{kind.__qualname__}",
            self._why_not(kind, home, name),
        )

    def _unpickle(self, payload: Any, tensors: Any, externals: Any) -> NoReturn:
        raise NotAllowed(
            f"worker {self._worker!r} is strict and was sent a pickle, which it does not read; "
            f"send it {values.TAKES}",
            worker=self._worker,
            refused="a pickle",
        )

    def _why_not(self, kind: type, home: type | None, name: str) -> str:
        if any(registry.is_exposed(vars(base).get(name)) for base in kind.__mro__):
            assert home is not None
            return f"as {home.__qualname__} overrides it without @{EXPOSE}; put that there as well"
        if kind.__module__.partition(".")[0] in ("builtins", "torch", "torchweft"):
            return f"which declares no such method; call a function that does it (@{REGISTER})"
        return f"which the class does not declare; put @{EXPOSE} above its definition"

    def _find(self, name: bytes) -> Any:
        found = self._own.find(name)
        return registry.registered.find(name) if found is None else found

    def _refuse_name(self, name: bytes) -> NoReturn:
        text = text_of(name)
        module, colon, _ = text.partition(":")
        together = [each for each in registry.REGISTERED_TOGETHER if module.startswith(f"{each}.")]
        if together:
            option = registry.OPTION.format(f"*{together[0]}.CALLABLES, ...")
            self._refuse(text, f"which is not registered there; {together[0]} needs {option}")
        if colon and module not in sys.modules and not module.startswith("torchweft."):
            why = (
                f"whose module is not imported there, so no @{REGISTER} in it has run; import "
                f"{registry.shortened(module)} in that worker before it joins"
            )
        else:
            why = f"which is not registered there; put @{REGISTER} above its definition"
        self._refuse(text, f"{why}, or name it in {registry.OPTION.format('...')}")

    def _refuse(self, what: str, why: str) -> NoReturn:
        shown = registry.shortened(what)
        raise NotAllowed(
            f"worker {self._worker!r} is strict and does not run {shown}, {why}",
            worker=self._worker,
            refused=what,
        )
