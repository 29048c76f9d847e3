"""The closed lists of names behind the allow-list: the functions and classes that are safe.

A worker with an allow-list follows a name in a message only into modules on that list, to the
names that are listed here, and to those of Weft in ``registry``. Any worker of the group can call
a function of these lists with any arguments, so it must do no more than make a value.
"""

from __future__ import annotations

import builtins
from typing import Any

import torch

from torchweft import errors

_SHOWN_LENGTH = 200

PLAIN_CLASSES: frozenset[type] = frozenset(
    {
        *(bool, int, float, complex, str, bytes, bytearray, object, range, slice),
        *(tuple, list, dict, set, frozenset),
    }
)

SAFE = frozenset(
    {
        *(f"builtins:{kind.__name__}" for kind in PLAIN_CLASSES),
        *("builtins:Ellipsis", "builtins:NotImplemented"),
        *("collections:ChainMap", "collections:Counter", "collections:OrderedDict"),
        *("collections:defaultdict", "collections:deque"),
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

METHOD_NAMES = frozenset(
    {
        "collections:ChainMap",
        "collections:Counter",
        "collections:OrderedDict",
        "collections:defaultdict",
        "collections:deque",
    }
)
"""The same by name."""

REFUSED_METHODS = frozenset({(str, "format"), (str, "format_map"), (torch.nn.Module, "compile")})
"""Methods that read attributes named in a text, or run a compiler with the caller's options."""

_UNARY = "call len iter next bool int float complex index abs neg pos invert round str repr hash"
_CONTAINER = "getitem setitem delitem contains reversed missing"
_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
_COMPARISON = "eq ne lt le gt ge"
_CONTEXT = "enter exit"


def _usual_dunders() -> frozenset[str]:
    binary = _BINARY.split()
    names = [*_UNARY.split(), *_CONTAINER.split(), *_COMPARISON.split(), *_CONTEXT.split()]
    names += [*binary, *(f"r{name}" for name in binary), *(f"i{name}" for name in binary)]
    return frozenset(f"__{name}__" for name in names)


USUAL_DUNDERS = _usual_dunders()
"""The only methods with two underscores that may be called: those behind operators and calls."""


def is_error(name: str) -> bool:
    """Tells whether ``module:name`` is a built-in class of errors."""
    module, _, path = name.partition(":")
    found = vars(builtins).get(path) if module == "builtins" else None
    return isinstance(found, type) and issubclass(found, Exception)


def is_known_error(name: str) -> bool:
    """Tells whether ``module:name`` is a class of errors of Python or of Weft."""
    return is_error(name) or is_weft_error(name)


def is_weft_error(name: str) -> bool:
    """Tells whether ``module:name`` is one of Weft's own classes of errors."""
    module, _, path = name.partition(":")
    found = vars(errors).get(path) if module == errors.__name__ else None
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
