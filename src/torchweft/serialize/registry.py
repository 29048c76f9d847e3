"""The names that messages may follow on any worker: those of Weft, and harmless ones of others.

Functions and classes of Weft carry a mark at their definition. A worker with an allow-list, and a
strict worker, follow a name into Weft only to a function or class with the required mark. Any
worker of the group can call a marked function with any arguments. So the function must only make a
value, or check its arguments: types, that functions are registered, and that objects were made for
it.

A mark is set while the module of the function is imported, and a worker imports most modules when
the first message needs them. So each mark below lists the modules in which it may stand. A message
can cause the import of these modules, and no others; a mark in another module is an error at its
import. No message can set a mark.

The safe functions and classes of Python and torch are closed lists. They must do no more than make
a value, whatever their arguments.
"""

from __future__ import annotations

import builtins
from types import ModuleType
from typing import Any, TypeVar

import torch

from torchweft import errors, ids
from torchweft.errors import ConfigurationError
from torchweft.protocol import weights
from torchweft.serialize.functions import import_module

T = TypeVar("T")


class Mark:
    """A mark for functions and classes; used as the outermost decorator. Thread-safe.

    Args:
        modules: Modules in which the mark may stand.
    """

    def __init__(self, *modules: str) -> None:
        self.modules = frozenset(modules)
        self._names: set[str] = set()

    def __call__(self, member: T) -> T:
        """Sets the mark.

        Raises:
            ConfigurationError: The mark may not stand in this module.
        """
        marked: Any = member
        name = f"{marked.__module__}:{marked.__qualname__}"
        if marked.__module__ not in self.modules:
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
    "torchweft.mapreduce.ending",
    "torchweft.mapreduce.shared",
    "torchweft.nn.owner",
    "torchweft.optim.clipping",
    "torchweft.optim.local",
    "torchweft.rpc.collective",
    "torchweft.observe.examining",
    "torchweft.rpc.serving",
    "torchweft.rpc.stream_sources",
    "torchweft.observe.tracing.recorder",
)
"""Workers of Weft call these functions on one another, on strict workers as well. They must check
their arguments: types, that functions are registered, and that objects were made for them."""

remotely_callable_unless_strict = Mark(
    "torchweft.compat.rpc.api",
    "torchweft.compat.rpc.references",
    "torchweft.observe.examining",
)
"""Workers of Weft call these functions on one another; a strict worker refuses them."""

rebuilds_plain = Mark(
    "torchweft.embedding.dynamic",
    "torchweft.embedding.host",
    "torchweft.embedding.plan.configs",
    "torchweft.embedding.plan.layout",
    "torchweft.embedding.rules",
    "torchweft.embedding.wire",
    "torchweft.errors",
    "torchweft.ids",
    "torchweft.mapreduce.shared",
    "torchweft.nn.owner",
    "torchweft.nn.remote_module",
    "torchweft.optim.groups",
    "torchweft.optim.local",
    "torchweft.protocol.weights",
    "torchweft.rl.agent",
    "torchweft.rl.environments",
    "torchweft.rl.following",
    "torchweft.rl.observer",
    "torchweft.rl.policies",
    "torchweft.rl.replay",
    "torchweft.rl.trajectories",
    "torchweft.rpc.batching.queue",
    "torchweft.rpc.collective",
    "torchweft.serialize.reducers",
    "torchweft.weights.layout",
    "torchweft.weights.publisher",
)
"""These rebuild an object of Weft, or a sparse tensor, from plain values; in pickles as well."""

rebuilds_pickled = Mark(
    "torchweft.compat.remote_module",
    "torchweft.serialize.exceptions",
    "torchweft.serialize.reducers",
)
"""These rebuild further kinds of objects, in pickles only."""

loads_script = Mark("torchweft.serialize.reducers")
"""These load compiled code, which is a program: only if ``torch.jit`` is allowed."""

has_callable_methods = Mark(
    "torchweft.nn.remote_module",
    "torchweft.optim.distributed",
    "torchweft.rpc.handles",
    "torchweft.rpc.rref",
)
"""With an allow-list, other workers may call these classes' methods on a referenced value."""

# These modules are below this one, and cannot import it.
for _member in (
    *(errors._rebuild_with_fields, ids.ReferenceId, ids.WorkerInfo),
    *(weights.Offer, weights.Version),
):
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
