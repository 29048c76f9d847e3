"""The closed lists of names behind the allow-list: what is safe, and what is Weft's own.

A worker with an allow-list follows a name in a message only into modules on that list, and to
what is listed here. Whatever stands here can be called by any worker of the group with any
arguments, so it must do no more than make a value, or be written with that in mind. A test
compares Weft's own entries with the calls in Weft's code. Strict workers have lists of their own.
"""

from __future__ import annotations

import builtins
from typing import Any

import torch

from torchweft import errors
from torchweft.serialize.functions import resolve

_SHOWN_LENGTH = 200

ENTRY_POINTS = frozenset(
    {
        "torchweft.mapreduce.shared:content",
        "torchweft.mapreduce.shared:make",
        "torchweft.mapreduce.shared:pull",
        "torchweft.mapreduce.shared:run",
        "torchweft.mapreduce.ending:failed",
        "torchweft.nn.owner:apply",
        "torchweft.nn.owner:create",
        "torchweft.nn.owner:load_state",
        "torchweft.nn.owner:parameters",
        "torchweft.nn.owner:run",
        "torchweft.nn.owner:run_at",
        "torchweft.nn.owner:set_training",
        "torchweft.nn.owner:state",
        "torchweft.optim.clipping:norms",
        "torchweft.optim.clipping:scale",
        "torchweft.optim.local:change",
        "torchweft.optim.local:load",
        "torchweft.optim.local:place",
        "torchweft.optim.local:save",
        "torchweft.optim.local:step",
        "torchweft.rpc.collective:bring",
        "torchweft.rpc.collective:tell",
        "torchweft.rpc.gathering.following:failed",
        "torchweft.rpc.gathering.following:withdrawn",
        "torchweft.rpc.serving:backward_from",
        "torchweft.rpc.serving:call_method",
        "torchweft.rpc.serving:fetch",
        "torchweft.compat.rpc.api:_broadcast_to_followers",
        "torchweft.compat.rpc.api:_gather_to_leader",
        "torchweft.compat.rpc.owners:_rref_typeof_on_owner",
        "torchweft.compat.rpc.owners:when_made",
    }
)
"""The functions of Weft that its workers call on one another."""

STRICT_ENTRY_POINTS = frozenset(
    {
        "torchweft.mapreduce.shared:content",
        "torchweft.mapreduce.shared:make",
        "torchweft.mapreduce.shared:pull",
        "torchweft.mapreduce.shared:run",
        "torchweft.mapreduce.ending:failed",
        "torchweft.nn.owner:apply",
        "torchweft.nn.owner:create",
        "torchweft.nn.owner:load_state",
        "torchweft.nn.owner:parameters",
        "torchweft.nn.owner:run",
        "torchweft.nn.owner:run_at",
        "torchweft.nn.owner:set_training",
        "torchweft.nn.owner:state",
        "torchweft.optim.clipping:norms",
        "torchweft.optim.clipping:scale",
        "torchweft.optim.local:change",
        "torchweft.optim.local:load",
        "torchweft.optim.local:place",
        "torchweft.optim.local:save",
        "torchweft.optim.local:step",
        "torchweft.rpc.collective:bring",
        "torchweft.rpc.collective:tell",
        "torchweft.rpc.gathering.following:failed",
        "torchweft.rpc.gathering.following:withdrawn",
        "torchweft.rpc.serving:backward_from",
        "torchweft.rpc.serving:call_method",
        "torchweft.rpc.serving:fetch",
    }
)
"""Those that a strict worker runs for others. An entry point that is to be added here must check
what it is given: types, that functions are registered, and that objects were made for it."""

REBUILDERS = frozenset(
    {
        "torchweft.errors:_rebuild_with_fields",
        "torchweft.ids:ReferenceId",
        "torchweft.ids:WorkerInfo",
        "torchweft.mapreduce.shared:Slot",
        "torchweft.nn.owner:Step",
        "torchweft.nn.remote_module:_received",
        "torchweft.optim.groups:GroupPart",
        "torchweft.optim.local:Placed",
        "torchweft.optim.local:Saved",
        "torchweft.rpc.gathering.terms:Key",
        "torchweft.serialize.reducers:_sparse_coo",
    }
)
"""What makes again an object of Weft, or a sparse tensor, of plain values."""

REBUILDERS_OF_PICKLES = REBUILDERS | frozenset(
    {
        "torchweft.compat.remote_module:_remote_module_receiver",
        "torchweft.serialize.exceptions:ScriptError",
        "torchweft.serialize.reducers:_as_parameter",
        "torchweft.serialize.reducers:_as_subclass",
        "torchweft.serialize.reducers:_meta",
        "torchweft.serialize.reducers:_mkldnn",
        "torchweft.serialize.reducers:_nested",
        "torchweft.serialize.reducers:_per_channel",
        "torchweft.serialize.reducers:_per_tensor",
        "torchweft.serialize.reducers:_sparse_compressed",
        "torchweft.serialize.reducers:_typed_storage",
        "torchweft.serialize.reducers:_untyped_storage",
        "torchweft.serialize.reducers:_wrapper",
        "torchweft.serialize.reducers:set_attributes",
    }
)
"""The same for pickles, which know more kinds."""

SCRIPT_LOADERS = frozenset(
    {
        "torchweft.serialize.reducers:_load_script",
        "torchweft.serialize.reducers:_load_script_function",
    }
)
"""They load compiled code, which is a program: only where ``torch.jit`` is allowed."""

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
"""Classes and functions that only make a value, whatever they are called with."""

TORCH = "torch"
TORCH_PARTS = frozenset(
    {
        *("torch._C._fft", "torch._C._linalg", "torch._C._nn", "torch._C._nested"),
        *("torch._C._sparse", "torch._C._special", "torch._tensor", "torch.distributions"),
        *("torch.fft", "torch.functional", "torch.linalg", "torch.nested", "torch.nn"),
        *("torch.optim", "torch.random", "torch.sparse", "torch.special"),
    }
)
"""What the entry ``torch`` stands for, beside the operators and tensor methods: what computes.

Elsewhere in torch there are functions that load pickles, compile sources, read and write files and
run commands. Who needs one of those modules names it.
"""

_NOT_OPERATORS = frozenset({"from_file"})

METHOD_CLASSES: frozenset[type] = frozenset(
    {*PLAIN_CLASSES, torch.Tensor, torch._C.TensorBase, torch.nn.Module}
)
"""Classes whose methods may be called on what a reference refers to, whatever is on the list."""

METHOD_NAMES = frozenset(
    {
        "collections:ChainMap",
        "collections:Counter",
        "collections:OrderedDict",
        "collections:defaultdict",
        "collections:deque",
        "torchweft.nn.chain:Chain",
        "torchweft.nn.remote_module:RemoteModule",
        "torchweft.optim.distributed:DistributedOptimizer",
        "torchweft.rpc.handles:RRef",
    }
)
"""The same by name: Weft's are in higher layers."""

REFUSED_METHODS = frozenset({(str, "format"), (str, "format_map"), (torch.nn.Module, "compile")})
"""They read attributes by names in a text, or run a compiler with options of the caller's."""

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
"""The only methods with two underscores that may be called: what an operator or a call does."""


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


def strict_entry_point(name: bytes) -> Any:
    """Returns the function of Weft that a strict worker runs under a name for others, or None."""
    text = name.decode("utf-8", "replace")
    return resolve(name) if text in STRICT_ENTRY_POINTS else None


def shortened(what: str) -> str:
    """Returns a text of a message as it may stand in an error."""
    return what if len(what) <= _SHOWN_LENGTH else f"{what[:_SHOWN_LENGTH]}..."


def is_operator(function: Any) -> bool:
    """Tells whether a function is one of torch's own that computes on tensors."""
    name = getattr(function, "__name__", "_")
    if name.startswith("_") or name in _NOT_OPERATORS:
        return False
    variable_functions = vars(torch._C)["_VariableFunctions"]
    return getattr(variable_functions, name, None) is getattr(torch, name, None) is function
