"""Takes objects of torch and numpy apart for the pickler.

A dense tensor is left whole: its memory travels beside the pickle. Any other torch object becomes a
call that rebuilds it from dense tensors, which the pickler then takes out in turn. Taking apart is
differentiable where torch allows it, so that gradients flow back.
"""

from __future__ import annotations

import functools
import io
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchweft.engine.codec.functions import name_of, resolve
from torchweft.engine.codec.registry import loads_script, rebuilds_pickled, rebuilds_plain
from torchweft.engine.codec.tensors import is_dense
from torchweft.errors import AutogradError, ProtocolError, SerializationError

Reduced = tuple[Any, ...]
"""A callable, its arguments, and the further items that the pickle protocol allows."""

_DENSE_REDUCE = (Tensor.__reduce_ex__, Parameter.__reduce_ex__)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def reduce_tensor(tensor: Tensor) -> Any:
    """Takes apart a tensor that is more than dense memory.

    Returns:
        A reduced value of the pickle protocol, NotImplemented for a type with its own reduction,
        and None for a dense tensor.

    Raises:
        SerializationError: The tensor has no parts that could be sent.
    """
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter:
        return _reduce_subclass(tensor)
    if is_dense(tensor):
        return None
    with torch.enable_grad():  # the parts require grad where the tensor does
        if kind is Parameter:
            return _as_parameter, (tensor.detach(), tensor.requires_grad)
        if tensor.is_nested:
            return _nested, (list(tensor.unbind()), tensor.layout)
        if tensor.is_quantized:
            return _reduce_quantized(tensor)
        return _reduce_layout(tensor)


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor of a subclass has memory of its own, as wrappers of other tensors do not."""
    if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return True
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(tensor, fake.FakeTensor):
        return False  # Torch warns where its address is asked for.
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.data_ptr() != 0


@rebuilds_pickled
def set_attributes(target: object, attributes: dict[str, object]) -> None:
    """Restores the attributes that a program had attached to a tensor."""
    _check_tensor(target, type(target))
    vars(target).update(attributes)


def reduce_torch(value: object) -> Reduced | None:
    """Takes apart objects that torch, or the default pickler, cannot pickle; None for others."""
    reducer = _REDUCERS.get(type(value))
    if reducer is not None:
        return reducer(value)
    if isinstance(value, torch.jit.ScriptModule):
        return _load_script, (_script_bytes(value),)
    if isinstance(value, np.dtype) and _is_plain(value):
        return _dtype_named, (value.str,)
    return None


def is_reduced(kind: type) -> bool:
    """Whether ``reduce_torch`` may take instances of a class apart."""
    return kind in _REDUCERS or issubclass(kind, (torch.jit.ScriptModule, np.dtype))


def register_reducer(kind: type, reducer: Callable[[Any], Reduced | None]) -> None:
    """Has objects of a class, subclasses not included, taken apart by ``reducer`` from now on."""
    _REDUCERS[kind] = reducer


def _reduce_subclass(tensor: Tensor) -> Any:
    kind = type(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        is_jagged = tensor.layout is torch.jagged
    if is_jagged:
        return _reduce_jagged(tensor)
    if kind.__reduce_ex__ not in _DENSE_REDUCE or kind.__reduce__ is not object.__reduce__:
        return NotImplemented  # it reduces itself, as lazy modules' uninitialized parameters do
    is_traceable = is_traceable_wrapper_subclass(tensor)
    if is_traceable or not has_memory(tensor):
        _check_graph_of_wrapper(tensor)
        # Torch's own reduction makes the wrapper anew, with its attributes.
        return _reduce_wrapper(tensor) if is_traceable else NotImplemented
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        plain = tensor.as_subclass(Tensor)
    state = dict(vars(tensor)) or None
    return _as_subclass, (plain, kind), state, None, None, set_attributes


@rebuilds_pickled
def _as_parameter(data: Tensor, requires_grad: bool) -> Parameter:
    return Parameter(data, requires_grad)


def _check_tensor(value: object, kind: object) -> None:
    """Raises ProtocolError if a message has these functions change anything but a tensor."""
    is_kind = isinstance(kind, type) and issubclass(kind, Tensor)
    if not is_kind or not isinstance(value, Tensor):
        raise ProtocolError(f"a message makes a tensor of {kind!r} out of a {type(value).__name__}")


@rebuilds_pickled
def _as_subclass(plain: Tensor, kind: type[Tensor]) -> Tensor:
    _check_tensor(plain, kind)
    try:
        # Keep the same object: a leaf stays a leaf, and a placeholder of the autograd layer stays
        # the object that this layer knows.
        plain.__class__ = kind
    except TypeError:  # the subclass has slots
        return plain.as_subclass(kind)
    return plain


def _reduce_jagged(tensor: Any) -> Reduced:
    # Its own reduction takes the tensor that it holds, which has no graph; ``values`` has one.
    with torch.enable_grad():
        values = tensor.values()
    rows = tensor.offsets(), tensor.lengths(), tensor._ragged_idx
    args = (values, *rows, tensor._maybe_min_seqlen, tensor._maybe_max_seqlen)
    attached = {name: each for name, each in vars(tensor).items() if not name.startswith("_")}
    return _jagged, args, attached or None, None, None, set_attributes


@rebuilds_pickled
def _jagged(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    dimension: int,
    shortest: int | None,
    longest: int | None,
) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, dimension, shortest, longest
    )


def _check_graph_of_wrapper(tensor: Tensor) -> None:
    """Raises SerializationError if a wrapper has a graph: its parts, which are sent, have none."""
    with torch._C.DisableTorchFunctionSubclass():
        has_graph = tensor.grad_fn is not None
    if has_graph and torch.is_grad_enabled():
        raise SerializationError(
            f"a {type(tensor).__name__} wraps other tensors, and its graph would be lost in a "
            "call: send the tensors that it was made of, or its detach()"
        )


def _reduce_wrapper(tensor: Any) -> Reduced:
    """Takes apart a subclass that holds other tensors instead of memory."""
    names, context = tensor.__tensor_flatten__()
    # Beside tensors, the parts of a DTensor have its mesh.
    parts = {name: getattr(tensor, name) for name in names}
    place = tuple(tensor.size()), tensor.stride(), tensor.requires_grad
    return _wrapper, (type(tensor), parts, context, *place)


@rebuilds_pickled
def _wrapper(
    kind: Any,
    parts: dict[str, object],
    context: object,
    shape: object,
    strides: object,
    requires_grad: bool,
) -> Tensor:
    _check_tensor(next(iter(parts.values()), None), kind)
    made: Tensor = kind.__tensor_unflatten__(parts, context, shape, strides)
    return made.requires_grad_() if requires_grad else made


def _reduce_layout(tensor: Tensor) -> Reduced:
    shape = tuple(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        if tensor.requires_grad:
            tensor = tensor.coalesce()  # only then torch returns values that carry gradients
            return _sparse_coo, (tensor.indices(), _values_of(tensor), shape, True)
        return _sparse_coo, (tensor._indices(), tensor._values(), shape, tensor.is_coalesced())
    if tensor.layout in _COMPRESSED:
        return _sparse_compressed, (*_indices_of(tensor), _values_of(tensor), shape, tensor.layout)
    if tensor.is_mkldnn:
        return _mkldnn, (tensor.to_dense(),)
    if tensor.is_meta:
        return _meta, (shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
    raise SerializationError(
        f"a tensor with layout {tensor.layout} cannot be sent; send its dense equivalent"
    )


@rebuilds_plain
def _sparse_coo(
    indices: Tensor, values: Tensor, shape: tuple[int, ...], is_coalesced: bool
) -> Tensor:
    # Check the indices: beyond the shape, later operations would leave the memory. Copy them
    # before: the sender, or a part of the message that shares them, could change them afterwards.
    for part in (indices, values):
        if not isinstance(part, Tensor) or part.layout is not torch.strided:
            raise ProtocolError(f"a message makes a sparse tensor of a {type(part).__name__}")
    indices = indices.detach().clone()
    made = torch.sparse_coo_tensor(
        indices,
        values.detach() if is_coalesced else values,
        shape,
        is_coalesced=is_coalesced,
        check_invariants=True,
        device=values.device,
    )
    return _with_values(made, values) if is_coalesced else made


@rebuilds_pickled
def _sparse_compressed(
    compressed: Tensor, plain: Tensor, values: Tensor, shape: Any, layout: torch.layout
) -> Tensor:
    made = torch.sparse_compressed_tensor(
        compressed,
        plain,
        values.detach(),
        shape,
        layout=layout,
        check_invariants=True,
        device=values.device,
    )
    return _with_values(made, values)


# Constructors of sparse tensors, and ``values()`` of compressed ones, lose terms of second
# derivatives without an error. Both are linear, and each is the other's derivative. So here are two
# functions for them whose derivatives are made of one another.

_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)


def _indices_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors that say where the values of a sparse tensor are.

    Args:
        tensor: A coalesced tensor of coordinates, or a compressed tensor.
    """
    if tensor.layout is torch.sparse_coo:
        return (tensor.indices(),)
    if tensor.layout in _BY_COLUMN:
        return tensor.ccol_indices(), tensor.row_indices()
    return tensor.crow_indices(), tensor.col_indices()


def _values_of(tensor: Tensor) -> Tensor:
    """Returns the values of a coalesced or compressed tensor, in its graph."""
    if not tensor.requires_grad:
        return tensor.values()
    apply: Any = _Values.apply
    values: Tensor = apply(tensor)
    return values


def _with_values(tensor: Tensor, values: Tensor) -> Tensor:
    """Returns a tensor with the pattern of a coalesced or compressed one, in the graph of values.

    Args:
        tensor: The tensor, which may have the values already, but no graph.
        values: Its values.
    """
    if not values.requires_grad:
        return tensor
    apply: Any = _WithValues.apply
    made: Tensor = apply(values, tensor)
    return made


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.pattern = tensor.detach()
        return tensor.detach().values().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return _with_values(_rebuilt(ctx.pattern, gradient.detach()), gradient)


class _WithValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, tensor: Tensor) -> Tensor:
        ctx.pattern = tensor.detach()
        return _rebuilt(tensor, values.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _values_at(ctx.pattern, gradients[0]), None


def _rebuilt(pattern: Tensor, values: Tensor) -> Tensor:
    """Returns a tensor with the pattern of another one, whose indices have been checked."""
    places: Any = _indices_of(pattern)
    if pattern.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(
            places[0], values, pattern.shape, is_coalesced=True, check_invariants=False
        )
    compressed, plain = places
    return torch.sparse_compressed_tensor(
        compressed, plain, values, pattern.shape, layout=pattern.layout, check_invariants=False
    )


def _values_at(pattern: Tensor, gradient: Tensor) -> Tensor:
    """Returns what a gradient of any layout has at the values of ``pattern``, in its graph.

    Raises:
        AutogradError: The gradient has elements where the tensor has none. They have no place in
            the message to the sender.
    """
    if gradient.layout is torch.sparse_coo:
        gradient = gradient.coalesce()
    if gradient.layout is pattern.layout and _are_same(_indices_of(gradient), _indices_of(pattern)):
        return _values_of(gradient)
    if gradient.layout is pattern.layout is torch.sparse_coo and not torch.is_grad_enabled():
        values = gradient.sparse_mask(pattern).values()  # without a dense tensor
        given = gradient.values()
    else:
        given = gradient if gradient.layout is torch.strided else gradient.to_dense()
        if pattern.layout is torch.sparse_coo:
            values = given[tuple(pattern.indices())]
        else:
            values = _values_of(given.sparse_mask(pattern))
    if values.count_nonzero() != given.count_nonzero():
        raise AutogradError(
            f"the gradient of a sparse tensor of shape {tuple(pattern.shape)} that another worker "
            "computed has elements where the tensor has none, which would be lost on the way "
            "back; send the tensor as tensor.to_dense()"
        )
    return values


def _are_same(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return all(map(torch.equal, some, others))


@rebuilds_pickled
def _mkldnn(dense: Tensor) -> Tensor:
    return dense.to_mkldnn()


@rebuilds_pickled
def _meta(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> Tensor:
    return torch.empty_strided(
        shape, strides, dtype=dtype, device="meta", requires_grad=requires_grad
    )


@rebuilds_pickled
def _nested(parts: list[Tensor], layout: torch.layout) -> Tensor:
    return torch.nested.as_nested_tensor(parts, layout=layout)


def _reduce_quantized(tensor: Tensor) -> Reduced:
    if tensor.dtype not in _QUANTIZED:
        raise SerializationError(
            f"a tensor of dtype {tensor.dtype} cannot be sent; send tensor.dequantize()"
        )
    scheme = tensor.qscheme()
    if scheme == torch.per_tensor_affine:
        return _per_tensor, (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
    if scheme == torch.per_channel_affine:
        scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        axis = tensor.q_per_channel_axis()
        return _per_channel, (tensor.int_repr(), scales, zero_points, axis)
    raise SerializationError(
        f"a tensor quantised as {scheme} cannot be sent; send tensor.dequantize()"
    )


_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32)


@rebuilds_pickled
def _per_tensor(integers: Tensor, scale: float, zero_point: int) -> Tensor:
    return torch._make_per_tensor_quantized_tensor(integers, scale, zero_point)


@rebuilds_pickled
def _per_channel(integers: Tensor, scales: Tensor, zero_points: Tensor, axis: int) -> Tensor:
    return torch._make_per_channel_quantized_tensor(integers, scales, zero_points, axis)


def _reduce_untyped_storage(storage: torch.UntypedStorage) -> Reduced:
    # Send it as a tensor, so that tensors on the same storage in the message go on sharing it.
    content = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return _untyped_storage, (content.set_(storage),)


@rebuilds_pickled
def _untyped_storage(content: Tensor) -> torch.UntypedStorage:
    if content.untyped_storage().nbytes() != content.numel():
        content = content.clone()  # it arrived in a buffer with room to spare
    return content.untyped_storage()


def _reduce_operator(operator: Any) -> Reduced | None:
    name = name_of(operator, main_by_name=True)
    return None if name is None else (resolve, (name,))


def _reduce_builtin(function: Any) -> Reduced | None:
    if isinstance(function.__reduce__(), str):
        return None  # A global by itself. Others reduce to getattr, which no allow-list can admit.
    return _reduce_operator(function)


def _reduce_method(method: types.MethodType) -> Reduced | None:
    function, owner = method.__func__, method.__self__
    kind = owner if isinstance(owner, type) else type(owner)
    found = getattr(kind, getattr(function, "__name__", ""), None)
    if getattr(found, "__func__", found) is function:
        return None
    # Pickle looks it up by its name: a private one, or one of a decorator, has another one.
    return types.MethodType, (function, owner)


def _reduce_script_function(function: Any) -> Reduced:
    name = name_of(function, main_by_name=False)
    if name is not None:
        return resolve, (name,)
    return _load_script_function, (_script_bytes(function),)


def _script_bytes(scripted: Any) -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    return buffer.getvalue()


@loads_script
def _load_script(content: bytes) -> object:
    load: Callable[[io.BytesIO], object] = torch.jit.load
    return load(io.BytesIO(content))


@loads_script
@functools.lru_cache(maxsize=256)
def _load_script_function(content: bytes) -> object:
    # Functions have no state, so the same one can be returned again. It must also outlive the call
    # that brought it: tasks that it started with torch.jit.fork go on using its code.
    return _load_script(content)


def _reduce_number_info(info: Any) -> Reduced:
    return type(info), (getattr(torch, info.dtype),)


# Arrays and scalars of numpy, and paths. Their own reductions cost four times as much, and are no
# part of the values that a strict worker reads.

_AS_TENSOR_FROM_BYTES = 16 * 1024
"""A larger array travels as a tensor: a channel moves its memory, and no pickle holds it."""


def _is_plain(kind: np.dtype[Any]) -> bool:
    return not (kind.hasobject or kind.names or kind.metadata) and kind.itemsize > 0


def _reduce_array(array: np.ndarray[Any, Any]) -> Reduced | None:
    kind, flags = array.dtype, array.flags
    if kind.char == "O":
        return _array_of_objects, (array.shape, tuple(array.flat))
    if not _is_plain(kind):
        return None
    order: Literal["C", "F"] = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
    if array.nbytes <= _AS_TENSOR_FROM_BYTES:
        return _array, (kind.str, array.shape, array.tobytes(order), order)
    is_whole = flags.c_contiguous or flags.f_contiguous
    if not (is_whole and flags.writeable):  # torch warns about memory that is read-only.
        array = array.copy(order)
    flat = torch.from_numpy(array.reshape(-1, order=order).view(np.uint8))
    return _array, (kind.str, array.shape, flat, order)


@rebuilds_plain
def _array(kind: str, shape: Any, content: Any, order: str) -> np.ndarray[Any, Any]:
    memory: Any
    if type(content) is bytes:
        memory = bytearray(content)
    elif _is_flat(content):
        memory = content.detach().cpu().numpy()
    else:
        raise ProtocolError("a message makes an array of something else than bytes")
    made: np.ndarray[Any, Any] = np.ndarray(
        shape, _dtype_named(kind), memory, order="F" if order == "F" else "C"
    )
    if made.nbytes != len(memory):
        raise ProtocolError(f"an array of {made.nbytes} bytes comes with {len(memory)}")
    return made


@rebuilds_pickled
def _array_of_objects(shape: Any, items: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    flat: np.ndarray[Any, Any] = np.empty(len(items), dtype=object)
    for place, item in enumerate(items):
        flat[place] = item
    made: np.ndarray[Any, Any] = flat.reshape(shape)
    return made


def _is_flat(content: Any) -> bool:
    """Whether an object is a tensor of bytes, which does not repeat its elements."""
    is_bytes = type(content) is Tensor and content.dtype is torch.uint8
    return is_bytes and content.dim() == 1 and bool(content.is_contiguous())


def _reduce_scalar(scalar: np.generic) -> Reduced | None:
    kind = scalar.dtype
    return (_scalar, (kind.str, scalar.tobytes())) if _is_plain(kind) else None


@rebuilds_plain
def _scalar(kind: str, content: Any) -> Any:
    dtype = _dtype_named(kind)
    if type(content) is not bytes or len(content) != dtype.itemsize:
        raise ProtocolError(f"a message makes a value of numpy of other bytes than {dtype} has")
    return np.ndarray((), dtype, content)[()]


@rebuilds_plain
def _dtype_named(kind: object) -> np.dtype[Any]:
    """Returns a dtype whose values any bytes may be; bytes are no addresses of objects."""
    if type(kind) is not str:
        raise ProtocolError("a message makes values of numpy out of something else")
    made = np.dtype(kind)
    if not _is_plain(made):
        raise ProtocolError(f"a message makes values of numpy of the dtype {kind!r}")
    return made


def _reduce_path(path: pathlib.PurePath) -> Reduced:
    return _path, (str(path), isinstance(path, pathlib.Path))


@rebuilds_plain
def _path(text: str, is_concrete: bool) -> pathlib.PurePath:
    if type(text) is not str:
        raise ProtocolError("a message makes a path out of something else")
    return pathlib.PosixPath(text) if is_concrete else pathlib.PurePosixPath(text)


def _refuse_proxy(_: object) -> Reduced:
    raise SerializationError(
        "torch.fx.symbolic_trace records the code around a call, whose arguments have no values "
        "yet: call the remote function outside of the traced module"
    )


_REDUCERS: dict[type, Callable[[Any], Reduced | None]] = {
    np.ndarray: _reduce_array,
    **dict.fromkeys(
        (kind for kind in set(np.sctypeDict.values()) if kind is not np.object_), _reduce_scalar
    ),
    **dict.fromkeys((pathlib.PurePosixPath, pathlib.PosixPath), _reduce_path),
    torch.UntypedStorage: _reduce_untyped_storage,
    torch.fx.Proxy: _refuse_proxy,
    torch.finfo: _reduce_number_info,
    torch.iinfo: _reduce_number_info,
    torch.jit.ScriptFunction: _reduce_script_function,
    OpOverload: _reduce_operator,
    OpOverloadPacket: _reduce_operator,
    CustomOpDef: _reduce_operator,
    types.MethodType: _reduce_method,
    types.BuiltinFunctionType: _reduce_builtin,
    types.MethodDescriptorType: _reduce_builtin,
    types.WrapperDescriptorType: _reduce_builtin,
}
