"""Values that are larger or slower than the bytes that they came in."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.free_encoder import FreeEncoder, Keys, Numbered
from tests.thorough import examples
from torchweft.engine.codec import values as tags
from torchweft.engine.codec.tensors import separated
from torchweft.engine.codec.values import (
    UNFOLDED_FLOOR_BYTES,
    UNFOLDING,
    decode,
    unfolded_limit,
)
from torchweft.errors import ProtocolError, SerializationError

_ONE_HASH = (1 << 61) - 1
"""Integers hash to their remainder by this number."""
_LIMIT_S = 2.0


def _packed(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    encoder = FreeEncoder()
    return encoder.encode(value), encoder.tensors


def _decode(value: Any) -> Any:
    payload, tensors = _packed(value)
    limit_bytes = unfolded_limit(len(payload), tensors)
    return decode(payload, tensors, (), limit_bytes=limit_bytes)


def _laughs(depth: int, leaf: Any = 0) -> list[Any]:
    value = [leaf]
    for _ in range(depth):
        value = [value, value]
    return value


# Keys


KEYS: dict[str, Callable[[int], Iterable[Any]]] = {
    "integers": lambda count: (number * _ONE_HASH for number in range(count)),
    "floats and integers": lambda count: (
        float(2 ** (61 * number)) if number < 16 else 1 + number * _ONE_HASH
        for number in range(count)
    ),
    "complex numbers": lambda count: (
        complex(-1000003.0 * number, number) for number in range(count)
    ),
    "tuples": lambda count: ((number * _ONE_HASH, 1) for number in range(count)),
    "nested tuples": lambda count: (((number * _ONE_HASH,),) for number in range(count)),
    "frozensets": lambda count: (frozenset([1 + number * _ONE_HASH]) for number in range(count)),
}


@pytest.mark.parametrize("tag", [tags.SET, tags.FROZENSET, tags.DICTIONARY])
def test_many_keys_of_one_hash_are_refused_soon(tag: int) -> None:
    for name, make in KEYS.items():
        payload, _ = _packed(Keys(tag, list(make(8_000))))
        began_s = time.thread_time()
        with pytest.raises(SerializationError, match="collide"):
            decode(payload, (), (), limit_bytes=1 << 30)
        assert time.thread_time() - began_s < _LIMIT_S, name


def test_honest_keys_are_read_whatever_their_number() -> None:
    ids = [number * 2654435761 % (1 << 40) for number in range(50_000)]
    values: list[Any] = [
        set(range(50_000)),
        frozenset(ids),
        {number << 20: number for number in range(20_000)},
        OrderedDict.fromkeys(range(100, 0, -1)),
        {(number, str(number)): None for number in range(20_000)},
        {number / 7 for number in range(50_000)},
        {*map(str, range(20_000))},
    ]
    for value in values:
        decoded = _decode(value)
        assert decoded == value
        assert type(decoded) is type(value)
        if isinstance(value, dict):
            assert list(decoded) == list(value)


# Unfolded sizes


def test_a_nest_of_shared_lists_is_refused_in_proportion_to_its_bytes() -> None:
    for depth in (20, 60, 140):
        with pytest.raises(SerializationError, match="repeat and expand in the remote function"):
            _decode(_laughs(depth))
    assert _decode(_laughs(8)) == _laughs(8)
    payload, _ = _packed(_laughs(60))
    decode(payload, (), ())  # Members of a group that is not strict may send it.


def test_an_expanded_tensor_counts_with_all_its_elements() -> None:
    one = torch.ones(1)
    largest = UNFOLDED_FLOOR_BYTES // one.itemsize
    assert unfolded_limit(0, [one.expand(largest)]) == UNFOLDED_FLOOR_BYTES
    for tensors in ([one.expand(largest + 1)], [one.expand(1 << 61)], [one.expand(largest)] * 2):
        with pytest.raises(SerializationError, match="stride 0"):
            unfolded_limit(0, tensors)
    wide = torch.ones(1 << 20)
    assert unfolded_limit(0, [wide.expand(UNFOLDING, -1)]) == UNFOLDING * wide.nbytes


def test_a_copy_of_a_tensor_takes_no_more_than_its_memory() -> None:
    expanded = torch.arange(3.0).view(3, 1).expand(3, 1 << 40)
    copy = separated(expanded)
    assert copy.stride() == expanded.stride()
    assert copy.shape == expanded.shape
    assert copy[2, 1 << 30] == 2.0
    assert copy.untyped_storage().nbytes() == 12
    assert not copy._is_view()
    windows = torch.arange(10).unfold(0, 5, 1)
    for tensor in (windows, torch.ones(2, 3).t(), torch.empty(0, 4), torch.tensor(3)):
        made = separated(tensor)
        assert torch.equal(made, tensor)
        assert made.untyped_storage().nbytes() <= max(tensor.untyped_storage().nbytes(), 1)
        assert made.data_ptr() != tensor.data_ptr() or not tensor.numel()


# The grammar of values

_ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([number * _ONE_HASH for number in range(4)]),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.builds(Numbered, st.just(tags.AGAIN), st.integers(0, 8)),
    st.builds(Numbered, st.just(tags.TENSOR), st.integers(0, 2)),
)
_HASHABLE = st.recursive(
    st.integers(0, 40).map(_ONE_HASH.__mul__) | st.text(max_size=3) | st.floats(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
_KEYS = st.builds(
    Keys,
    st.sampled_from((tags.SET, tags.FROZENSET, tags.DICTIONARY)),
    st.lists(_HASHABLE, max_size=40),
)
_VALUES = st.recursive(
    _ATOMS | _KEYS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.lists(inner, max_size=6).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=4),
        st.tuples(inner, st.integers(1, 60)).map(lambda pair: _laughs(pair[1], pair[0])),
    ),
    max_leaves=20,
)


class _TooLarge(Exception):
    """More has been walked than a value may have."""


def _walk(value: Any, left: list[int], above: frozenset[int] = frozenset()) -> None:
    """Walks a value as code does that knows nothing of sharing; counts what a copy would take."""
    left[0] -= value.numel() * value.itemsize if isinstance(value, torch.Tensor) else 1
    if left[0] < 0:
        raise _TooLarge
    if isinstance(value, (list, tuple, set, frozenset, dict)) and id(value) not in above:
        above |= {id(value)}
        for each in value.items() if isinstance(value, dict) else value:
            _walk(each, left, above)


@settings(max_examples=examples(200))
@given(value=_VALUES, is_expanded=st.booleans())
def test_walking_a_value_takes_time_in_proportion_to_its_bytes(
    value: Any, is_expanded: bool
) -> None:
    """Property: no walk of an accepted value sees more than the limit, and decoding is quick."""
    encoder = FreeEncoder()
    try:
        payload = encoder.encode(value)
    except RecursionError:
        return
    tensors = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(1)]
    if is_expanded:
        tensors[2] = torch.zeros(1).expand(1 << 19)
    limit_bytes = unfolded_limit(len(payload), tensors)
    began_s = time.thread_time()
    try:
        decoded = decode(payload, tensors, (), limit_bytes=limit_bytes)
    except (SerializationError, ProtocolError):
        return
    finally:
        assert time.thread_time() - began_s < 0.5 + len(payload) * 2e-5
    _walk(decoded, [limit_bytes])
