"""The names that messages may follow on any worker: those of Weft, and harmless ones of others.

Functions and classes of Weft carry a mark at their definition. A worker with an allow-list, and a
strict worker, follow a name into Weft only to a function or class with the required mark. Any
worker of the group can call a marked function with any arguments. So the function must only make a
value, or check its arguments: types, that functions are registered, and that objects were made for
it.

A mark is set while the module of the function is imported, and a worker imports most modules when
the first message needs them. So each mark below lists the modules in which it may stand. A message
can cause the import of these modules, and no others; a mark in another module is an error at its
import. No message can set a mark. Classes of values may be marked in modules of others as well,
which the program imports itself.

The safe functions and classes of Python and torch are closed lists. They must do no more than make
a value, whatever their arguments.

A list of modules admits everything that they contain, and everything that torch or numpy can be
made to do through them. So a strict worker follows no name, and imports nothing. It looks names up
in a table that the program has filled, entry by entry. A method of a value may be called if its
class declares it, at the place where the method is defined. Registrations and declarations are kept
here by identity. No message can add to them.
"""

from __future__ import annotations

import builtins
import weakref
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch

from torchweft import errors, ids
from torchweft.engine.codec.functions import describe, import_module, name_of, without_alias
from torchweft.errors import ArgumentTypeError, ConfigurationError

T = TypeVar("T")


class Mark:
    """A mark for functions and classes; used as the outermost decorator. Thread-safe.

    Args:
        modules: Modules in which the mark may stand.
        admits_others: Whether it may stand in modules outside of Weft, too. No message causes the
            import of these.
    """

    def __init__(self, *modules: str, admits_others: bool = False) -> None:
        self.modules = frozenset(modules)
        self._admits_others = admits_others
        self._names: set[str] = set()

    def __call__(self, member: T) -> T:
        """Sets the mark.

        Raises:
            ConfigurationError: The mark may not stand in this module.
        """
        marked: Any = member
        name = f"{marked.__module__}:{marked.__qualname__}"
        is_own = f"{marked.__module__}.".startswith("torchweft.")
        if marked.__module__ not in self.modules and (is_own or not self._admits_others):
            raise ConfigurationError(
                f"{name} may not be marked for messages of others: its module is not on the list "
                f"of the mark in {__name__}"
            )
        self._names.add(name)
        return member

    def has(self, name: str) -> bool:
        """Tells whether ``module:name`` has the mark, and imports the module if it is listed.

        Raises:
            UnknownFunction: The module is listed and cannot be imported here.
        """
        if name in self._names:
            return True
        module, _, path = name.partition(":")
        if module in self.modules:
            import_module(module, path)
        return name in self._names


remotely_callable = Mark(
    "torchweft.launch.cluster_store",
    "torchweft.mapreduce.shared",
    "torchweft.nn.owner",
    "torchweft.optim.clipping",
    "torchweft.optim.local",
    "torchweft.rpc.collective",
    "torchweft.observe.examining",
    "torchweft.rpc.proxies",
    "torchweft.rpc.serving",
    "torchweft.rpc.streams",
    "torchweft.observe.tracing.recorder",
)
"""Workers of Weft call these functions on one another, on strict workers as well. They must check
their arguments: types, that functions are registered, and that objects were made for them."""

remotely_callable_unless_strict = Mark(
    "torchweft.compat.rpc.api",
    "torchweft.compat.rpc.references",
)
"""Workers of Weft call these functions on one another; a strict worker refuses them."""

rebuilds_plain = Mark(
    "torchweft.embedding.dynamic",
    "torchweft.embedding.server",
    "torchweft.embedding.configs",
    "torchweft.embedding.layout",
    "torchweft.embedding.rows",
    "torchweft.embedding.rules",
    "torchweft.errors",
    "torchweft.ids",
    "torchweft.mapreduce.shared",
    "torchweft.nn.owner",
    "torchweft.nn.remote_module",
    "torchweft.optim.local",
    "torchweft.rl.agent",
    "torchweft.rl.environments",
    "torchweft.rl.observer",
    "torchweft.rl.policies",
    "torchweft.rl.replay",
    "torchweft.rl.trajectories",
    "torchweft.rpc.batching",
    "torchweft.rpc.collective",
    "torchweft.rpc.observed",
    "torchweft.engine.codec.reducers",
    "torchweft.weights.layout",
    "torchweft.weights.publisher",
    "torchweft.weights.versions",
    admits_others=True,
)
"""These rebuild an object of Weft, or a sparse tensor, from plain values; in pickles as well."""

rebuilds_pickled = Mark(
    "torchweft.compat.remote_module",
    "torchweft.engine.codec.exceptions",
    "torchweft.engine.codec.reducers",
)
"""These rebuild further kinds of objects, in pickles only."""

loads_script = Mark("torchweft.engine.codec.reducers")
"""These load compiled code, which is a program: only if ``torch.jit`` is allowed."""

has_callable_methods = Mark(
    "torchweft.nn.remote_module",
    "torchweft.optim.distributed",
    "torchweft.engine.worker.references",
    "torchweft.rpc.api",
)
"""With an allow-list, other workers may call these classes' methods on a referenced value."""

# These modules are below this one, and cannot import it.
for _member in (errors._rebuild_with_fields, ids.ReferenceId, ids.WorkerInfo):
    rebuilds_plain(_member)


_SHOWN_LENGTH = 200

REGISTERED_TOGETHER = tuple(
    f"torchweft.{name}" for name in "checkpoint embedding hybrid rl weights".split()
)
"""Packages whose ``CALLABLES`` a strict worker names to take part in them."""

PLAIN_CLASSES: frozenset[type] = frozenset(
    {
        *(bool, int, float, complex, str, bytes, bytearray, object, range, slice),
        *(tuple, list, dict, set, frozenset),
    }
)

METHOD_NAMES = frozenset(
    f"collections:{name}" for name in "ChainMap Counter OrderedDict defaultdict deque".split()
)
"""Further classes whose methods may be called on a referenced value, by name."""

SAFE = METHOD_NAMES | frozenset(
    {
        *(f"builtins:{kind.__name__}" for kind in PLAIN_CLASSES),
        *("builtins:Ellipsis", "builtins:NotImplemented"),
        *("datetime:date", "datetime:datetime", "datetime:time"),
        *("datetime:timedelta", "datetime:timezone"),
        *("torch:Size", "torch:device", "torch:finfo", "torch:iinfo", "torch:OutOfMemoryError"),
        *("torch:Tensor", "torch.nn.parameter:Parameter", "torch.nn.parameter:Buffer"),
    }
)
"""Classes and functions that only make a value, whatever their arguments."""

TORCH = "torch"
TORCH_PARTS = frozenset(
    {
        *("torch._C._fft", "torch._C._linalg", "torch._C._nn", "torch._C._nested"),
        *("torch._C._sparse", "torch._C._special", "torch._tensor", "torch.distributions"),
        *("torch.fft", "torch.functional", "torch.linalg", "torch.nested", "torch.nn"),
        *("torch.optim", "torch.random", "torch.sparse", "torch.special"),
    }
)
"""Modules that the entry ``torch`` stands for, beside operators and tensor methods: they compute.

Other modules of torch have functions that load pickles, compile sources, read and write files and
run commands. Programs that need such a module list it by name.
"""

_NOT_OPERATORS = frozenset({"from_file"})

METHOD_CLASSES: frozenset[type] = frozenset(
    {*PLAIN_CLASSES, torch.Tensor, torch._C.TensorBase, torch.nn.Module}
)
"""Classes whose methods may be called on a referenced value, whatever is on the list."""

REFUSED_METHODS = frozenset({(str, "format"), (str, "format_map"), (torch.nn.Module, "compile")})
"""Methods that read attributes named in a text, or run a compiler with the caller's options."""

_UNARY = "call len iter next bool int float complex index abs neg pos invert round str repr hash"
_CONTAINER = "getitem setitem delitem contains reversed missing"
_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
_COMPARISON = "eq ne lt le gt ge"
_CONTEXT = "enter exit"

_IN_PLACE, _SWAPPED = ([letter + name for name in _BINARY.split()] for letter in "ir")

USUAL_DUNDERS = frozenset(
    f"__{name}__"
    for name in [
        *f"{_UNARY} {_CONTAINER} {_BINARY} {_COMPARISON} {_CONTEXT}".split(),
        *_IN_PLACE,
        *_SWAPPED,
    ]
)
"""The only methods with two underscores that may be called: those behind operators and calls."""


def is_error(name: str) -> bool:
    """Tells whether ``module:name`` is a built-in class of errors."""
    return _is_error_of(builtins, name)


def is_weft_error(name: str) -> bool:
    """Tells whether ``module:name`` is one of Weft's own classes of errors."""
    return _is_error_of(errors, name)


def _is_error_of(home: ModuleType, name: str) -> bool:
    module, _, path = name.partition(":")
    found = vars(home).get(path) if module == home.__name__ else None
    return isinstance(found, type) and issubclass(found, Exception)


def shortened(what: str) -> str:
    """Returns a text of a message, shortened for use in an error."""
    return what if len(what) <= _SHOWN_LENGTH else f"{what[:_SHOWN_LENGTH]}..."


def is_operator(function: Any) -> bool:
    """Tells whether a function is one of torch's own that computes on tensors."""
    name = getattr(function, "__name__", "_")
    if name.startswith("_") or name in _NOT_OPERATORS:
        return False
    variable_functions = vars(torch._C)["_VariableFunctions"]
    return getattr(variable_functions, name, None) is getattr(torch, name, None) is function


# The callables of a strict worker: functions and classes registered singly, and declared methods


REGISTER = "rpc.register"
EXPOSE = "rpc.expose"
OPTION = "RpcBackendOptions(strict=True, callables=({}))"

_exposed: weakref.WeakSet[FunctionType] = weakref.WeakSet()


class Callables:
    """Functions and classes by the names under which other workers call them."""

    def __init__(self, members: Iterable[Any] = ()) -> None:
        self._members: dict[bytes, Any] = {}
        for member in members:
            self.add(member)

    def add(self, function: Any) -> None:
        """Adds a function or class; a new definition replaces an earlier one of the same name.

        Raises:
            ArgumentTypeError: It is not a function or class, or has no name that others could send.
        """
        self._members[_name(function)] = function

    def find(self, name: bytes) -> Any:
        """Returns the function or class with a name, or None."""
        return self._members.get(name)

    def has(self, function: Any) -> bool:
        """Tells whether ``function`` itself was added, under any name."""
        return any(function is member for member in list(self._members.values()))


registered = Callables()
"""Those that the program has registered, for all of its strict workers."""


def register(function: T) -> T:
    """Lets other workers call a function or class of a strict worker; a decorator, or a call.

    The function object is registered, as it is at this moment, under its module and name. As a
    decorator, ``register`` must be the outermost. For functions that are defined elsewhere, call it
    (``rpc.register(torch.nn.Linear)``), or name them in ``RpcBackendOptions(callables=...)``.
    Registering a class lets other workers make objects of it; ``expose`` declares methods. Workers
    that are not strict ignore registrations. Thread-safe.

    Args:
        function: A function or class that other workers can import.

    Returns:
        The same function or class.

    Raises:
        ArgumentTypeError: It is neither, or it has no name that others could send: a lambda, or a
            function that was defined inside another function.

    Example::

        @rpc.register
        def evaluate(batch: torch.Tensor) -> float: ...
    """
    registered.add(function)
    return function


def expose(method: T) -> T:
    """Lets other workers call a method by reference on a strict worker; a decorator.

    It must be the outermost decorator except for ``staticmethod`` and ``classmethod``. A subclass
    inherits the declaration with the method, but must declare an overriding method again. Names
    that begin with an underscore are refused, except those of operators and calls, such as
    ``__call__``. Workers that are not strict ignore declarations.

    Args:
        method: A function in the body of a class.

    Returns:
        The same method.

    Raises:
        ArgumentTypeError: It is not such a function, or its name is for the class alone.

    Example::

        class Observer:
            @rpc.expose
            def run_episode(self, steps: int) -> torch.Tensor: ...
    """
    function = getattr(method, "__func__", method)
    if not isinstance(function, FunctionType):
        raise ArgumentTypeError(
            f"{EXPOSE} declares methods, and this is a {type(method).__name__}; write it above "
            "the definition of a method"
        )
    parent = function.__qualname__.rpartition(".")[0]
    if not parent or parent.endswith("<locals>"):
        raise ArgumentTypeError(
            f"{EXPOSE} declares methods, and {function.__qualname__} is defined outside of any "
            f"class; use {REGISTER} for functions"
        )
    if not _is_public(function.__name__):
        raise ArgumentTypeError(
            f"{EXPOSE} cannot declare {function.__qualname__}: a name with a leading underscore "
            "is for the class alone; give the method another name"
        )
    _exposed.add(function)
    return method


def is_exposed(attribute: object) -> bool:
    """Tells whether an attribute in the body of a class was declared by ``expose``."""
    function = getattr(attribute, "__func__", attribute)
    return isinstance(function, FunctionType) and function in _exposed


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in USUAL_DUNDERS


def _name(function: Any) -> bytes:
    if not callable(function):
        raise ArgumentTypeError(
            f"{REGISTER} takes functions and classes, and this is a {type(function).__name__}"
        )
    name = name_of(function, main_by_name=True)
    if name is not None:
        return name
    module = getattr(function, "__module__", None)
    path = getattr(function, "__qualname__", "<")
    # A decorator runs before the name is bound to the function.
    is_definition = isinstance(function, (FunctionType, type)) and "<" not in path
    if not is_definition or not isinstance(module, str):
        raise ArgumentTypeError(
            f"{describe(function)} has no name by which another worker could call it; define it "
            f"at the top level of a module, and register that ({REGISTER})"
        )
    return f"{without_alias(module)}:{path}".encode()
