from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from torchweft.compat.rpc.internal import (
    PythonUDF,
    _internal_rpc_pickler,
    _InternalRPCPickler,
    deserialize,
    references_beside,
    serialize,
)
from torchweft.engine.codec import reducers
from torchweft.engine.codec.objects import pack, unpack
from torchweft.errors import (
    ProtocolError,
    SerializationError,
    UnknownFunction,
)


class Point:
    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y
        self.cannot_travel = (number for number in ())


def reduce_point(point: Point) -> tuple[Any, ...]:
    return Point, (point.x, point.y)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets the reducers that a test registers."""
    monkeypatch.setattr(reducers, "_REDUCERS", dict(reducers._REDUCERS))
    monkeypatch.setattr(_internal_rpc_pickler, "_class_reducer_dict", {})


@pytest.mark.parametrize("value", [None, 5, [1, {"a": (2,)}], PythonUDF(len, ([1],), None)])
def test_what_has_no_tensors_comes_back(value: object) -> None:
    binary, tensors = serialize(value)
    assert isinstance(binary, bytes)
    assert tensors == []
    assert deserialize(binary, tensors) == value


def test_tensors_are_put_into_a_table() -> None:
    first, second = torch.ones(2), torch.zeros(3, requires_grad=True)
    binary, tensors = serialize({"a": first, "b": [second, first]})
    assert [id(tensor) for tensor in tensors] == [id(first), id(second)]
    other = [torch.full((1,), 7.0), torch.full((1,), 8.0)]
    assert deserialize(binary, other) == {"a": other[0], "b": [other[1], other[0]]}
    binary, tensors = serialize(first)
    assert deserialize(binary, tensors) is first


class Nested:
    def __getstate__(self) -> Any:
        return serialize(PythonUDF(torch.add, (torch.ones(2), torch.ones(2)), None))

    def __setstate__(self, state: Any) -> None:
        call = deserialize(*state)
        self.value = call.func(*call.args)


def test_an_object_may_use_the_pickler_while_it_is_pickled() -> None:
    binary, tensors = serialize((torch.zeros(1), Nested(), torch.zeros(1)))
    before, nested, after = deserialize(binary, tensors)
    assert torch.equal(nested.value, torch.full((2,), 2.0))
    assert not before.any()
    assert not after.any()


def test_reducers_of_the_default_pickler_hold_for_calls_too() -> None:
    with pytest.raises(SerializationError, match="generator"):
        serialize(Point(1, 2))
    _internal_rpc_pickler._register_reducer(Point, reduce_point)
    _internal_rpc_pickler._register_reducer(Point, len)  # the first registration stays
    assert deserialize(*serialize([Point(1, 2)]))[0].y == 2
    packed = pack(([Point(1, 2)], {}), main_by_name=True)
    (points,), _ = unpack(packed.payload, packed.tensors, packed.externals)
    assert (points.x, points.y) == (1, 2)


def test_reducers_of_another_pickler_are_its_own() -> None:
    class Mine(_InternalRPCPickler):
        pass

    mine = Mine()
    mine._register_reducer(Point, reduce_point)
    other = Mine()
    other._dispatch_table[Point] = reduce_point
    for pickler in (mine, other):
        point, tensor = deserialize(*pickler.serialize([Point(1, 2), torch.ones(1)]))
        assert (point.x, tensor.item()) == (1, 1.0)
    for pickler in (Mine(), _internal_rpc_pickler):
        with pytest.raises(SerializationError, match="generator"):
            pickler.serialize(Point(1, 2))
    with pytest.raises(SerializationError, match=r"\[1\].*generator"):
        mine.serialize([Point(1, 2), (number for number in ())])


def test_references_travel_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchweft.engine.codec import objects

    class Reference:
        def _serialize(self) -> None:
            raise SerializationError("an RRef cannot be serialized by itself")

    monkeypatch.setattr(objects, "_external_types", (Reference,))
    one, two = Reference(), Reference()
    with pytest.raises(SerializationError, match="by itself"):
        serialize([one])
    beside: list[Any] = []
    with references_beside(beside):
        binary, tensors = serialize([two, one, two])
    assert beside == [two, one]
    with references_beside(["second", "first"]):
        assert deserialize(binary, tensors) == ["second", "first", "second"]
    with pytest.raises(SerializationError):
        deserialize(binary, tensors)
    with pytest.raises(SerializationError, match="by itself"):
        serialize([one])


def test_bytes_that_are_none_of_ours() -> None:
    with pytest.raises(ProtocolError, match="no bytes of Weft's RPC pickler"):
        deserialize(pickle.dumps("text"), [])


def test_a_function_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    binary, tensors = serialize(PythonUDF(reduce_point, (), None))
    monkeypatch.delattr(f"{__name__}.reduce_point")
    with pytest.raises(UnknownFunction, match="RPC pickler does not serialize"):
        deserialize(binary, tensors)
