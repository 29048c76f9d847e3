from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tables import cases
from tests.unit.engine.codec.trips import object_trip
from torchweft.engine.codec.objects import pack, unpack
from torchweft.errors import SerializationError

# Sparse and nested tensors, quantisation, scripting and typed storages warn that they are
# experimental or deprecated, which is not tested here.
pytestmark = pytest.mark.filterwarnings("ignore")

DENSE = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 2.0, 3.0]])

SPARSE: dict[str, Callable[[], Tensor]] = {
    "coo": lambda: DENSE.to_sparse(),
    "coo, not coalesced": lambda: torch.sparse_coo_tensor(
        [[0, 0, 1]], [1.0, 2.0, 3.0], (2,), is_coalesced=False
    ),
    "coo, hybrid": lambda: torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 3), (4, 3)),
    "coo, empty": lambda: torch.zeros(2, 3).to_sparse(),
    "csr": lambda: DENSE.to_sparse_csr(),
    "csc": lambda: DENSE.to_sparse_csc(),
    "bsr": lambda: DENSE.to_sparse_bsr((1, 2)),
    "bsc": lambda: DENSE.to_sparse_bsc((1, 2)),
}


class Tagged(torch.Tensor):
    """A subclass with attributes."""


def as_tagged(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tagged)


class Slotted(torch.Tensor):
    __slots__ = ("tag",)


class TaggedParameter(nn.Parameter):
    """A subclass of Parameter, as sharding libraries define them."""


class Loud(torch.Tensor):
    """A subclass that intercepts every operation on it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


class Knowing(torch.Tensor):
    """A subclass with its own way of pickling."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return make_knowing, (self.as_subclass(Tensor) * 10,)


def make_knowing(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Knowing)


@cases("case", SPARSE)
def test_sparse_layouts_survive(case: str) -> None:
    tensor = SPARSE[case]()
    arrived = object_trip(tensor)
    assert arrived.layout == tensor.layout
    assert arrived.shape == tensor.shape
    assert arrived.dtype == tensor.dtype
    assert torch.equal(arrived.to_dense(), tensor.to_dense())
    if tensor.layout is torch.sparse_coo:
        assert arrived.is_coalesced() == tensor.is_coalesced()


def test_a_sparse_tensor_with_indices_outside_is_refused() -> None:
    packed = pack(torch.sparse_coo_tensor([[0, 5]], [1.0, 2.0], (6,)).coalesce(), main_by_name=True)
    packed.tensors[0] = torch.tensor([[0, 600]])
    with pytest.raises(SerializationError, match="index"):
        unpack(packed.payload, packed.tensors, [])


def test_quantised_tensors_survive() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    per_tensor = torch.quantize_per_tensor(values, 0.5, 3, torch.quint8)
    scales, zeros = torch.tensor([0.5, 0.25]), torch.tensor([0, 1])
    per_channel = torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)
    for tensor in (per_tensor, per_channel):
        arrived = object_trip(tensor)
        assert arrived.dtype == tensor.dtype
        assert arrived.qscheme() == tensor.qscheme()
        assert torch.equal(arrived.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_survive(layout: torch.layout) -> None:
    tensor = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)], layout=layout)
    arrived = object_trip(tensor)
    assert arrived.is_nested
    assert arrived.layout == layout
    for left, right in zip(arrived.unbind(), tensor.unbind(), strict=True):
        assert torch.equal(left, right)


def transposed_rows(leaf: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(leaf, torch.tensor([0, 1, 3])).transpose(1, 2)


def narrowed_rows(leaf: Tensor) -> Tensor:
    starts, lengths = torch.tensor([0, 1, 0]), torch.tensor([2, 1, 1])
    return torch.nested.narrow(leaf, 1, starts, lengths, layout=torch.jagged)


@pytest.mark.parametrize("make", [transposed_rows, narrowed_rows])
def test_gradients_find_their_way_through_a_jagged_tensor(make: Callable[[Tensor], Tensor]) -> None:
    leaf = torch.ones(3, 2, requires_grad=True)
    tensor = make(leaf)
    packed = pack([tensor, tensor * 2], main_by_name=True)
    arrived, doubled = unpack(packed.payload, packed.tensors, [])
    assert [each.tolist() for each in arrived.unbind()] == [
        each.tolist() for each in tensor.unbind()
    ]
    assert arrived.shape[0] == tensor.shape[0]
    (arrived + doubled).values().sum().backward()  # Two tensors of one message keep their rows.
    expected = torch.ones(3, 2, requires_grad=True)
    again = make(expected)
    (again + again * 2).values().sum().backward()
    assert torch.equal(leaf.grad, expected.grad)


def test_meta_and_mkldnn_tensors_survive() -> None:
    meta = torch.empty(2, 3, device="meta", requires_grad=True)
    arrived = object_trip(meta)
    assert (arrived.device, arrived.shape, arrived.requires_grad) == (meta.device, (2, 3), True)
    parameter = object_trip(nn.Linear(2, 2, device="meta")).weight
    assert type(parameter) is nn.Parameter
    assert parameter.is_meta
    if torch.backends.mkldnn.is_available():
        opaque = torch.ones(2, 2).to_mkldnn()
        arrived = object_trip(opaque)
        assert arrived.layout == opaque.layout
        assert torch.equal(arrived.to_dense(), opaque.to_dense())


@pytest.mark.parametrize("kind", [Tagged, TaggedParameter, Slotted, Loud])
def test_subclasses_keep_their_type(kind: Any) -> None:
    tensor = torch.arange(3.0).as_subclass(kind)
    if kind is Tagged:
        tensor.note = {"tensor": torch.ones(1)}
    arrived = object_trip([tensor, tensor])
    assert arrived[0] is arrived[1]
    assert type(arrived[0]) is kind
    with torch._C.DisableTorchFunctionSubclass():
        assert arrived[0].tolist() == [0, 1, 2]
    if kind is Tagged:
        assert arrived[0].note["tensor"].tolist() == [1]


@pytest.mark.parametrize("make", [as_tagged, TaggedParameter])
def test_gradients_find_their_way_through_a_subclass(make: Any) -> None:
    leaf = make(torch.ones(2)).requires_grad_()
    packed = pack(leaf, main_by_name=True)
    arrived: Any = unpack(packed.payload, packed.tensors, [])
    assert type(arrived) is type(leaf)
    (arrived * 3).sum().backward()
    assert leaf.grad.tolist() == [3, 3]
    assert object_trip(leaf).is_leaf


def test_a_subclass_with_its_own_reduction_is_asked() -> None:
    arrived = object_trip(torch.ones(2).as_subclass(Knowing))
    assert type(arrived) is Knowing
    assert arrived.tolist() == [10, 10]
    lazy = object_trip(nn.LazyLinear(3))
    assert isinstance(lazy.weight, nn.UninitializedParameter)


class Pair(torch.Tensor):
    """Wraps two tensors, and has no memory of its own."""

    @staticmethod
    def __new__(cls, left: Tensor, right: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, left.size(), dtype=left.dtype)

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lefts = [each.left if isinstance(each, Pair) else each for each in args]
        rights = [each.right if isinstance(each, Pair) else each for each in args]
        return Pair(func(*lefts, **(kwargs or {})), func(*rights, **(kwargs or {})))


class Telling(Pair):
    """Tells torch of what it is made; one part is no tensor, as the mesh of a DTensor."""

    mesh = "mesh"

    def __tensor_flatten__(self) -> Any:
        return ["left", "right", "mesh"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, shape: Any, strides: Any) -> Any:
        pair = Telling(parts["left"], parts["right"])
        pair.mesh = parts["mesh"]
        return pair


@pytest.mark.parametrize("kind", [Pair, Telling])
def test_a_subclass_that_wraps_tensors_survives(kind: Any) -> None:
    pair = kind(torch.arange(3.0), torch.ones(3)).requires_grad_()
    pair.mesh = "other"
    arrived: Any = object_trip([pair, pair])[1]
    assert type(arrived) is kind
    assert arrived.requires_grad
    assert (arrived.left.tolist(), arrived.right.tolist()) == ([0, 1, 2], [1, 1, 1])
    assert arrived.mesh == "other"
    assert object_trip(kind(torch.ones(2), torch.ones(2))).requires_grad is False


def test_the_graph_of_a_subclass_that_wraps_tensors_is_not_lost_silently() -> None:
    product = Pair(torch.ones(2), torch.ones(2)).requires_grad_() * 2
    with pytest.raises(SerializationError, match=r"a Pair wraps other tensors.* detach\(\)"):
        object_trip(product)
    assert object_trip(product.detach()).left.tolist() == [2, 2]
    with torch.no_grad():
        assert object_trip(product).left.tolist() == [2, 2]


def test_a_fake_tensor_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(2)
    with pytest.raises(SerializationError, match="send a tensor on the device 'meta'"):
        object_trip(fake)


def test_scripted_functions_and_modules_go_by_value_otherwise() -> None:
    unnamed = torch.jit.CompilationUnit("def triple(x):\n    return x * 3\n").triple
    assert object_trip(unnamed)(torch.ones(2)).tolist() == [3, 3]
    module = torch.jit.script(nn.Linear(2, 1))
    inputs = torch.randn(3, 2)
    arrived = object_trip({"module": module})["module"]
    assert isinstance(arrived, torch.jit.ScriptModule)
    assert torch.equal(arrived(inputs), module(inputs))
