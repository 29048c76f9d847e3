"""Calls of batched functions that stay unread until their batch runs, in a pair of workers."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.unit.agent.group import wait_until
from tests.unit.rpc.pair import LIMIT_S, Pair, pair_of
from torchweft.errors import BatchError, CallCancelled, QueueFull, ReferenceGone, SerializationError
from torchweft.ids import ReferenceId
from torchweft.rpc import serving
from torchweft.rpc.decoding import Decoder
from torchweft.rpc.encoding import Encoder
from torchweft.rpc.functions import BatchStatistics, batch_statistics, batched
from torchweft.rpc.handles import Handle
from torchweft.serialize import inline

_may_go_on = threading.Event()
_began = threading.Event()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of() as pair:
        yield pair


@pytest.fixture
def reads(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects an entry for each call whose arguments the callee reads by themselves."""
    found: list[int] = []
    read = Decoder.open

    def counted(decoder: Decoder, *args: object, **options: object) -> object:
        if decoder is pair.callee.decoder:
            found.append(1)
        return read(decoder, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "open", counted)
    return found


@batched(largest=4, smallest=4, longest_wait=LIMIT_S)
def four(values: Tensor, factors: Tensor) -> Tensor:
    return values * factors[:, None]


@batched(largest=4, smallest=4, longest_wait=LIMIT_S, pad=0.0)
def padded(values: Tensor) -> Tensor:
    return values.sum(dim=1)


@batched(largest=4, smallest=4, longest_wait=LIMIT_S, isolate=True)
def isolated(values: Tensor) -> Tensor:
    if (values < 0).any():
        raise ValueError("negative")
    return values


@batched(largest=2, limit=2)
def gated(values: Tensor) -> Tensor:
    _began.set()
    assert _may_go_on.wait(LIMIT_S)
    return values


@batched
def replaced(values: Tensor) -> Tensor:
    return values + 1


@batched
def replacement(values: Tensor) -> Tensor:
    return values + 2


weight = torch.ones(3, requires_grad=True)


@batched(largest=2, smallest=2, longest_wait=LIMIT_S)
def weighted(values: Tensor) -> Tensor:
    return values * weight


@batched
def changing(values: Tensor) -> Tensor:
    values += 1
    return values


def _four(pair: Pair, *values: Tensor) -> list[Tensor]:
    made = [pair.start(four, each, torch.tensor(2.0)) for each in values]
    return [each.wait() for each in made]


def test_calls_are_read_the_first_time_only(pair: Pair, reads: list[int]) -> None:
    rows = [torch.tensor([float(each), 1.0]) for each in range(4)]
    for expected in (4, 0, 0):
        reads.clear()
        found = _four(pair, *rows)
        assert [each.tolist() for each in found] == [[2.0 * place, 2.0] for place in range(4)]
        assert len(reads) == expected
    counts = batch_statistics(four)
    assert (counts.sizes, counts.calls, counts.waiting) == ({4: 3}, 12, 0)
    assert not pair.peer_of_callee.served


def test_other_calls_of_the_function_are_read(pair: Pair, reads: list[int]) -> None:
    ones = torch.ones(2)
    _four(pair, *[ones] * 4)
    reads.clear()
    made = [
        pair.start(four, ones, 2),
        pair.start(four, ones, torch.tensor(2.0)),
        pair.start(four, ones.requires_grad_(), torch.tensor(2.0)),
        pair.create(four, ones.detach(), torch.tensor(2.0)),
    ]
    with pytest.raises(BatchError, match="cannot be stacked"):
        made[0].wait()
    assert made[1].wait().tolist() == [2.0, 2.0]
    assert made[2].wait().tolist() == [2.0, 2.0]
    assert pair.fetch(made[3]).tolist() == [2.0, 2.0]
    assert len(reads) >= 4


def test_calls_of_another_shape(pair: Pair) -> None:
    twos = [torch.ones(2)] * 3
    _four(pair, *twos, torch.ones(2))
    made = [pair.start(four, each, torch.tensor(2.0)) for each in (*twos, torch.ones(5))]
    assert [each.wait().tolist() for each in made[:3]] == [[2.0, 2.0]] * 3
    with pytest.raises(BatchError, match=r"float32\[5\]"):
        made[3].wait()
    for _ in range(2):
        sizes = [pair.start(padded, torch.ones(size)) for size in (1, 2, 3, 4)]
        assert [each.wait().item() for each in sizes] == [1.0, 2.0, 3.0, 4.0]


def test_an_error_of_one_call(pair: Pair, reads: list[int]) -> None:
    for _ in range(2):
        reads.clear()
        made = [pair.start(isolated, torch.tensor([each])) for each in (1.0, -1.0, 2.0, 3.0)]
        with pytest.raises(ValueError, match="negative"):
            made[1].wait()
        assert [made[each].wait().item() for each in (0, 2, 3)] == [1.0, 2.0, 3.0]
    assert len(reads) == 4, "each call is run by itself, so each is read"


def test_a_message_that_cannot_be_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _four(pair, *[torch.ones(2)] * 4)
    encode = inline.encode

    def cut(tensors: list[Tensor]) -> object:
        content, requires_grad = encode(tensors)  # type: ignore[misc]
        return content[:-1] if tensors[0][0] == 7 else content, requires_grad

    monkeypatch.setattr(inline, "encode", cut)
    made = [pair.start(four, torch.full((2,), each), torch.tensor(2.0)) for each in (1, 7, 2, 3)]
    with pytest.raises(Exception, match=r"comes with|malformed"):
        made[1].wait()
    assert [made[each].wait().tolist() for each in (0, 2, 3)] == [[2.0] * 2, [4.0] * 2, [6.0] * 2]


@pytest.mark.parametrize("has_grad", [True, False])
def test_a_result_with_a_graph(pair: Pair, has_grad: bool) -> None:
    for _ in range(2):
        with torch.set_grad_enabled(has_grad):
            made = [pair.start(weighted, torch.full((3,), float(each))) for each in (2, 3)]
            assert [each.wait().tolist() for each in made] == [[2.0] * 3, [3.0] * 3]


def test_arguments_may_be_changed(pair: Pair) -> None:
    for _ in range(3):
        assert pair.sync(changing, torch.ones(2)).tolist() == [2.0, 2.0]


def test_limits_and_cancellation(pair: Pair) -> None:
    _may_go_on.set()
    pair.sync(gated, torch.tensor(0.0))
    _may_go_on.clear()
    _began.clear()
    before = batch_statistics(gated)
    assert (before.refused, before.left) == (0, 0)
    first = pair.start(gated, torch.tensor(0.0))
    assert _began.wait(LIMIT_S)
    others = [pair.start(gated, torch.tensor(float(each))) for each in range(1, 4)]
    with pytest.raises(QueueFull):
        others[2].wait()
    others[0].cancel()
    wait_until(lambda: batch_statistics(gated).waiting == 1, "the cancelled call to leave")
    _may_go_on.set()
    assert (first.wait().item(), others[1].wait().item()) == (0.0, 2.0)
    with pytest.raises(CallCancelled):
        others[0].wait()
    found = batch_statistics(gated)
    assert (found.refused, found.left, found.waiting) == (1, 1, 0)
    wait_until(lambda: not pair.peer_of_callee.served, "the end of all calls")


def test_a_function_that_the_program_replaces(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    name = replaced  # The caller goes on naming the function that it has.
    for _ in range(2):
        assert pair.sync(name, torch.ones(1)).item() == 2.0
    replacement.__qualname__ = replaced.__qualname__
    monkeypatch.setattr(sys.modules[__name__], "replaced", replacement)
    for _ in range(3):
        assert pair.sync(name, torch.ones(1)).item() == 3.0
    assert batch_statistics(replacement).calls == 3
    monkeypatch.undo()
    assert pair.sync(name, torch.ones(1)).item() == 2.0
    monkeypatch.delattr(sys.modules[__name__], "replaced")
    with pytest.raises(Exception, match="no such attribute"):
        pair.sync(name, torch.ones(1))


def test_nothing_is_gathered_without_such_calls(pair: Pair) -> None:
    assert pair.sync(abs, -1) == 1
    assert batch_statistics(weighted) == BatchStatistics()
    assert not pair.callee.gathering


class Model:
    @batched(largest=2, smallest=2, longest_wait=LIMIT_S)
    def scale(self, values: Tensor, factors: Tensor) -> Tensor:
        return values * factors[:, None]

    @batched
    def with_default(self, values: Tensor, factor: float = 2.0) -> Tensor:
        return values * torch.tensor(factor)[:, None]


def _value_behind(reference: tuple[int, int, int]) -> Any:
    return serving.owned(reference).value


def _scale(pair: Pair, model: Handle, *values: float) -> list[list[float]]:
    args = [(torch.full((2,), each), torch.tensor(2.0)) for each in values]
    made = [pair.start(serving.call_method, *model.id, "scale", None, *each) for each in args]
    return [each.wait().tolist() for each in made]


def test_calls_of_a_method_are_read_the_first_time_only(pair: Pair, reads: list[int]) -> None:
    one, other = pair.create(Model), pair.create(Model)
    for model in (one, other):
        assert _scale(pair, model, 1.0, 2.0) == [[2.0, 2.0], [4.0, 4.0]]
        reads.clear()
        assert _scale(pair, model, 3.0, 2.0) == [[6.0, 6.0], [4.0, 4.0]]
        assert not reads
    assert len(pair.callee.gathering) == 2
    for expected in (1, 1):
        reads.clear()
        values = (torch.ones(2),)
        assert pair.call_method(one, "with_default", *values).tolist() == [2.0, 2.0]
        assert len(reads) == expected, "not all arguments are given"


def test_calls_by_several_references_are_one_batch(pair: Pair, reads: list[int]) -> None:
    one = pair.create(Model)
    _scale(pair, one, 1.0, 2.0)
    other = pair.create(_value_behind, tuple(one.id))
    _scale(pair, other, 1.0, 2.0)
    assert len(pair.callee.gathering) == 2
    reads.clear()
    args = (torch.ones(2), torch.tensor(2.0))
    made = [
        pair.start(serving.call_method, *model.id, "scale", None, *args) for model in (one, other)
    ]
    assert [each.wait().tolist() for each in made] == [[2.0, 2.0]] * 2
    assert not reads


def test_a_method_of_a_value_that_is_gone(pair: Pair) -> None:
    model = pair.create(Model)
    for _ in range(2):
        _scale(pair, model, 1.0, 2.0)
    assert len(pair.callee.gathering) == 1
    target = tuple(model.id)
    kept = pair.callee.references.value_of(model.id).value
    del model
    wait_until(lambda: not pair.callee.references.is_owned(ReferenceId(*target)), "its release")
    args = (torch.ones(2), torch.tensor(2.0))
    made = [pair.start(serving.call_method, *target, "scale", None, *args) for _ in range(2)]
    for each in made:
        with pytest.raises(ReferenceGone):
            each.wait()
    assert not pair.callee.gathering
    del kept


def test_nothing_is_left_of_values_that_are_gone(pair: Pair) -> None:
    models = [pair.create(Model) for _ in range(3)]
    for model in models:
        _scale(pair, model, 1.0, 2.0)
    assert len(pair.callee.gathering) == 3
    del model, models
    gc.collect()
    wait_until(lambda: not pair.callee.gathering, "the end of the values")
    assert not pair.callee.agent.receiver._early


def test_a_method_that_the_program_replaces(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair.create(Model)
    for _ in range(2):
        assert _scale(pair, model, 1.0, 2.0) == [[2.0, 2.0], [4.0, 4.0]]
    monkeypatch.setattr(Model, "scale", lambda self, values, factors: values + factors)
    assert _scale(pair, model, 1.0, 2.0) == [[3.0, 3.0], [4.0, 4.0]]


class Decision(NamedTuple):
    actions: Tensor
    version: int
    outputs: dict[str, Tensor]


@batched(largest=2, smallest=2, longest_wait=LIMIT_S)
def decide(states: Tensor) -> Decision:
    return Decision(states.argmax(dim=1), 7, {"values": states.sum(1), "b": states, "a": states})


@batched(largest=2, smallest=2, longest_wait=LIMIT_S)
def pairs(states: Tensor) -> tuple[Tensor, Tensor, str]:
    return states, states.double(), "text"


@batched(largest=2, smallest=2, longest_wait=LIMIT_S)
def unusual(states: Tensor) -> Any:
    kind = int(states[0, 0])
    if kind == 0:
        return [states.t().contiguous().t()]
    if kind == 1:
        return {"lock": threading.Lock(), "states": states}
    if kind == 2:
        return {"large": torch.zeros(2, 1 << 20), "states": states}
    return {"beside": Sample(torch.ones(2)), "states": states}


class Sample:
    def __init__(self, image: Tensor) -> None:
        self.image = image


@pytest.fixture
def encodings(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects an entry for each answer that the callee encodes by itself."""
    found: list[int] = []
    encode = Encoder.packed_result

    def counted(encoder: Encoder, peer: Any, result: Any) -> Any:
        found.append(1)
        return encode(encoder, peer, result)

    monkeypatch.setattr(Encoder, "packed_result", counted)
    return found


def test_structured_results_are_encoded_together(pair: Pair, encodings: list[int]) -> None:
    states = [torch.tensor([each, 1.0, 2.0]) for each in (0.0, 3.0)]
    for _ in range(2):
        found = [each.wait() for each in [pair.start(decide, state) for state in states]]
        for state, made in zip(states, found, strict=True):
            assert type(made) is Decision
            assert (made.actions, made.version) == (state.argmax(), 7)
            assert list(made.outputs) == ["values", "b", "a"]
            assert made.outputs["values"] == state.sum()
            assert made.outputs["b"].tolist() == made.outputs["a"].tolist() == state.tolist()
            made.outputs["b"].zero_()
            assert made.outputs["a"].tolist() == state.tolist(), "memory of its own"
        both = [each.wait() for each in [pair.start(pairs, state) for state in states]]
        assert [(a.tolist(), b.dtype, c) for a, b, c in both] == [
            (state.tolist(), torch.float64, "text") for state in states
        ]
    assert not encodings


def test_results_that_have_to_be_encoded_each(pair: Pair, encodings: list[int]) -> None:
    def call(kind: int) -> list[Any]:
        made = [pair.start(unusual, torch.full((3,), float(kind))) for _ in range(2)]
        return [each.wait() for each in made]

    assert [each[0].tolist() for each in call(0)] == [[0.0] * 3] * 2
    with pytest.raises(SerializationError, match="lock"):
        call(1)
    assert [each["large"].shape for each in call(2)] == [(1 << 20,)] * 2
    found = call(3)
    assert [each["beside"].image.tolist() for each in found] == [[1.0, 1.0]] * 2
    assert len(encodings) >= 6


def test_answers_that_cannot_be_sent_together(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for answers")

    monkeypatch.setattr(pair.callee.agent.answers, "send_all", fail)
    for _ in range(2):
        made = [pair.start(pairs, torch.ones(3)) for _ in range(2)]
        for each in made:
            with pytest.raises(MemoryError, match="no room"):
                each.wait()
    wait_until(lambda: not pair.peer_of_callee.served, "the end of all calls")


class Moody:
    is_moody = False

    @batched(largest=2, smallest=2, longest_wait=LIMIT_S)
    def scale(self, values: Tensor, factors: Tensor) -> Tensor:
        return values * factors[:, None]

    def __getattribute__(self, name: str) -> Any:
        if name == "scale" and Moody.is_moody:
            raise ValueError("not today")
        return super().__getattribute__(name)


def test_an_object_whose_attributes_fail(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair.create(Moody)
    for _ in range(2):
        assert _scale(pair, model, 1.0, 2.0) == [[2.0, 2.0], [4.0, 4.0]]
    monkeypatch.setattr(Moody, "is_moody", True)
    with pytest.raises(ValueError, match="not today"):
        _scale(pair, model, 1.0, 2.0)
