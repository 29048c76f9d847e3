"""The closed lists of names behind the allow-list: what is safe, and what is Weft's own.

A worker with an allow-list follows a name in a message only into modules on that list, and to
what is listed here. Whatever stands here can be called by any worker of the group with any
arguments, so it must do no more than make a value, or be written with that in mind. A test
compares Weft's own entries with the calls in Weft's code.
"""

from __future__ import annotations

import builtins
from typing import Any

import torch

ENTRY_POINTS = frozenset(
    {
        "weft.mapreduce.shared:content",
        "weft.mapreduce.shared:make",
        "weft.mapreduce.shared:pull",
        "weft.mapreduce.shared:run",
        "weft.mapreduce.ending:failed",
        "weft.nn.owner:apply",
        "weft.nn.owner:create",
        "weft.nn.owner:load_state",
        "weft.nn.owner:parameters",
        "weft.nn.owner:run",
        "weft.nn.owner:run_at",
        "weft.nn.owner:set_training",
        "weft.nn.owner:state",
        "weft.optim.clipping:norms",
        "weft.optim.clipping:scale",
        "weft.optim.local:change",
        "weft.optim.local:load",
        "weft.optim.local:place",
        "weft.optim.local:save",
        "weft.optim.local:step",
        "weft.rpc.collective:bring",
        "weft.rpc.collective:tell",
        "weft.rpc.gathering.following:failed",
        "weft.rpc.gathering.following:withdrawn",
        "weft.rpc.serving:backward_from",
        "weft.rpc.serving:call_method",
        "weft.rpc.serving:fetch",
        "weft.compat.rpc.api:_broadcast_to_followers",
        "weft.compat.rpc.api:_gather_to_leader",
        "weft.compat.rpc.owners:_rref_typeof_on_owner",
        "weft.compat.rpc.owners:when_made",
    }
)
"""The functions of Weft that its workers call on one another."""

REBUILDERS = frozenset(
    {
        "weft.errors:_rebuild_with_fields",
        "weft.ids:ReferenceId",
        "weft.ids:WorkerInfo",
        "weft.mapreduce.shared:Slot",
        "weft.nn.owner:Step",
        "weft.nn.remote_module:_received",
        "weft.optim.groups:GroupPart",
        "weft.optim.local:Placed",
        "weft.optim.local:Saved",
        "weft.rpc.gathering.terms:Key",
        "weft.serialize.reducers:_as_parameter",
        "weft.serialize.reducers:_meta",
        "weft.serialize.reducers:_mkldnn",
        "weft.serialize.reducers:_nested",
        "weft.serialize.reducers:_per_channel",
        "weft.serialize.reducers:_per_tensor",
        "weft.serialize.reducers:_sparse_compressed",
        "weft.serialize.reducers:_sparse_coo",
    }
)
"""What makes again an object of Weft, or a kind of tensor, of plain values."""

REBUILDERS_OF_PICKLES = REBUILDERS | {
    "weft.compat.remote_module:_remote_module_receiver",
    "weft.serialize.exceptions:ScriptError",
    "weft.serialize.reducers:_as_subclass",
    "weft.serialize.reducers:_typed_storage",
    "weft.serialize.reducers:_untyped_storage",
    "weft.serialize.reducers:_wrapper",
    "weft.serialize.reducers:set_attributes",
}
"""The same for pickles, which know more kinds."""

SCRIPT_LOADERS = frozenset(
    {"weft.serialize.reducers:_load_script", "weft.serialize.reducers:_load_script_function"}
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
        *("numpy:dtype", "numpy:ndarray"),
        *("numpy.core.multiarray:_reconstruct", "numpy._core.multiarray:_reconstruct"),
        *("numpy.core.multiarray:scalar", "numpy._core.multiarray:scalar"),
        *("numpy.core.numeric:_frombuffer", "numpy._core.numeric:_frombuffer"),
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
        "weft.nn.chain:Chain",
        "weft.nn.remote_module:RemoteModule",
        "weft.optim.distributed:DistributedOptimizer",
        "weft.rpc.handles:RRef",
    }
)
"""The same by name: Weft's are in higher layers."""

REFUSED_METHODS = frozenset({(str, "format"), (str, "format_map")})
"""They read attributes of their arguments, by names in the text."""

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


def is_operator(function: Any) -> bool:
    """Tells whether a function is one of torch's own that computes on tensors."""
    name = getattr(function, "__name__", "_")
    if name.startswith("_") or name in _NOT_OPERATORS:
        return False
    variable_functions = vars(torch._C)["_VariableFunctions"]
    return getattr(variable_functions, name, None) is getattr(torch, name, None) is function
