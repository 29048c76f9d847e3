from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from torchweft.compat.rpc.internal import (
    PythonUDF,
    deserialize,
    references_beside,
    serialize,
)
from torchweft.errors import (
    ProtocolError,
    SerializationError,
    UnknownFunction,
)


def double(number: int) -> int:
    return 2 * number


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
    binary, tensors = serialize(PythonUDF(double, (1,), None))
    monkeypatch.delattr(f"{__name__}.double")
    with pytest.raises(UnknownFunction, match="RPC pickler does not serialize"):
        deserialize(binary, tensors)
