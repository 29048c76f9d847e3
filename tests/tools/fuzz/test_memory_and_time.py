"""Property: what comes from others takes memory and time in proportion to its bytes.

The inputs are those of the fuzzer: for each decoder valid bytes and changed ones, for a strict
worker messages of the whole grammar. ``torch`` takes its memory outside of what Python can trace;
so the results of its operators are counted. Processor time is measured, not the time of a clock.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.fuzz import targets
from tests.fuzz.mutating import Mutator
from tests.fuzz.target import Target
from tests.thorough import examples

pytestmark = pytest.mark.filterwarnings("ignore")

_EXAMPLES = 100
_BASE_BYTES = 16 << 20
"""Four times what a value of any size may unfold to: an answer and an error may have copies."""
_FACTOR = 256
_BASE_S = 1.0
_BYTE_S = 1e-4
"""Interpreted code, under a tracer of memory, for each byte."""


class _Allocations(TorchDispatchMode):
    """Counts the bytes of all storages that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.total_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_storage(each) for each in tree_iter((args, kwargs)) if _is_dense(each)}
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if _is_dense(each) and _storage(each) not in before:
                self.total_bytes += each.untyped_storage().nbytes()
        return result


def _is_dense(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_sparse


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture(scope="module", params=targets.NAMES)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    found = targets.load(request.param)
    with _Allocations():  # What is imported, and kept for ever, at first use does not count.
        for each in found.seeds():
            found.run(each)
    yield found
    found.end()


def _input(target: Target, seed: int) -> bytes:
    chance = random.Random(seed)
    if target.make is not None:
        return target.make(chance)
    seeds = target.seeds()
    return Mutator(chance, target).mutate(chance.choice(seeds), chance.choice(seeds))


@settings(max_examples=examples(_EXAMPLES), deadline=None)
@given(seed=st.integers(0, 1 << 62))
def test_memory_and_time_are_in_proportion_to_the_bytes(target: Target, seed: int) -> None:
    data = _input(target, seed)
    target.begin()
    began_s = time.process_time()
    with _Allocations() as allocations:
        target.check_memory(data)
    took_s = time.process_time() - began_s
    assert allocations.total_bytes <= _BASE_BYTES + _FACTOR * len(data)
    assert took_s <= _BASE_S + _BYTE_S * len(data)
