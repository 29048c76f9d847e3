from __future__ import annotations

import collections
import copyreg
import dataclasses
import enum
import functools
import gc
import pickle
import sys
import threading
import time
import types
import weakref
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.interpreters import frees_functions
from tests.unit.engine.codec import importable
from tests.unit.engine.codec.trips import object_trip
from torchweft.engine.codec import functions, objects
from torchweft.engine.codec.objects import pack, register_external, unpack
from torchweft.errors import ProtocolError, SerializationError

pytestmark = pytest.mark.usefixtures("twin")


@dataclasses.dataclass
class Batch:
    inputs: Tensor
    label: str = "none"
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


class Colour(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.fixture
def handle_type(monkeypatch: pytest.MonkeyPatch) -> type:
    """Registers a class of external objects, which are not pickled, for one test."""
    monkeypatch.setattr(objects, "_external_types", objects._external_types)

    @register_external
    class Handle:
        def __reduce__(self) -> Any:
            raise AssertionError("a handle is never pickled")

    return Handle


@pytest.fixture
def main_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    main = types.ModuleType("__main__")
    source = (
        "class Thing:\n    value = 7\n"
        "def work():\n    return Thing.value\n"
        "def make():\n    return lambda: Thing\n"
    )
    exec(source, vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    functions.locate.cache_clear()  # It has the main module of the test before.
    return main


def test_another_main_program_gets_everything_by_value(main_module: Any) -> None:
    packed = [
        pack(value, main_by_name=False)
        for value in (main_module.work, main_module.Thing(), [main_module.Thing])
    ]
    vars(main_module).clear()  # the receiver's program defines none of these
    work, thing, kinds = (unpack(each.payload, [], []) for each in packed)
    assert work() == 7  # type: ignore[operator]
    assert thing.value == 7  # type: ignore[attr-defined]
    assert kinds[0].value == 7  # type: ignore[index]


def test_a_spawned_process_sends_its_main_program_by_either_way(
    main_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    main_module.__name__ = "__mp_main__"
    for value in (main_module.Thing, main_module.work):
        value.__module__ = "__mp_main__"
    monkeypatch.setitem(sys.modules, "__mp_main__", main_module)
    try:
        by_name = pack(main_module.Thing, main_by_name=True)
        by_value = pack(main_module.work, main_by_name=False)
        thing = main_module.Thing
        monkeypatch.delitem(sys.modules, "__mp_main__")
        assert unpack(by_name.payload, [], []) is thing
        vars(main_module).clear()
        assert unpack(by_value.payload, [], [])() == 7  # type: ignore[operator]
    finally:
        if "__mp_main__" in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.unregister_pickle_by_value(types.ModuleType("__mp_main__"))


def test_an_object_that_cannot_be_rebuilt_says_why() -> None:
    class Refuses:
        def __setstate__(self, state: object) -> None:
            raise ValueError("version 3 is too old")

        def __getstate__(self) -> object:
            return {"version": 3}

    packed = pack(Refuses(), main_by_name=True)
    with pytest.raises(SerializationError, match="version 3 is too old") as caught:
        unpack(packed.payload, [], [])
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_payload_with_too_few_tensors_or_references_is_refused(handle_type: type) -> None:
    for value in (torch.ones(1), handle_type()):
        packed = pack([value], main_by_name=True)
        with pytest.raises((ProtocolError, SerializationError)):
            unpack(packed.payload, [], [])


def test_other_unpicklers_refuse_a_payload_with_tensors() -> None:
    packed = pack((torch.ones(1), object()), main_by_name=True)
    with pytest.raises((ImportError, AttributeError, ProtocolError)):
        pickle.loads(packed.payload)


NO = "worker 'far' runs Python 3.99, this one 3.11: functions do not travel by value between them"


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["lambda", "closure", "main", "class"])
def test_functions_that_cannot_go_by_value_are_refused_by_name(kind: str, nested: bool) -> None:
    def closure() -> bool:
        return nested

    class Local:
        def method(self) -> None: ...

    own = types.FunctionType(compile("0", "x", "eval"), {}, "own")
    own.__module__, own.__qualname__ = "__main__", "own"
    value: object
    value, name = {
        "lambda": (lambda: 0, "<lambda>"),
        "closure": (closure, "closure"),
        "main": (own, "own"),
        "class": (Local, "method"),
    }[kind]
    value = ([value], {}) if nested else value
    pack(value, main_by_name=False)
    with pytest.raises(SerializationError, match=f"^{NO}; put '.*{name}' into a module that both"):
        pack(value, main_by_name=False, not_by_value=NO)


# Objects of every kind


class Reduced:
    """Its copyreg reducer, where a test registers one, returns a text."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Reduced


class Meta(type):
    pass


class WithMeta(metaclass=Meta):
    def __eq__(self, other: object) -> bool:
        return type(other) is WithMeta


class Plain(Tensor):
    pass


class OwnReduction(Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return importable.plain, (int(self.sum()),)


class Nested:
    """Packs another object while it is packed itself."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __reduce__(self) -> Any:
        packed = pack(self.inner, main_by_name=True)
        return Unpacked, (packed.payload, packed.tensors)


def Unpacked(payload: bytes, tensors: list[Tensor]) -> Any:
    return unpack(payload, tensors, [])


class Slots:
    __slots__ = ("tensor", "text")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.text = tensor, "slots"


class Child(dict):  # type: ignore[type-arg]
    pass


class StateOnly:
    def __init__(self) -> None:
        self.number = 5

    def __getstate__(self) -> Any:
        return {"number": self.number + 1}


@dataclasses.dataclass(frozen=True)
class Frozen:
    place: tuple[int, ...]
    tensor: Tensor | None = None


@functools.cache
def many_kinds() -> dict[str, Any]:
    shared = torch.ones(2)
    note = torch.ones(1)
    note.note = {"of": shared}  # type: ignore[attr-defined]
    own: list[Any] = [shared]
    own.append(own)
    return {
        "numbers": (1, 2.5, 1 + 2j, True, None, "text", b"bytes", bytearray(b"x"), 1 << 100),
        "containers": [[], {}, {1, 2}, frozenset([3]), {"key": [(shared, shared)]}, own],
        "tensors": (shared, shared.t(), nn.Parameter(shared), torch.eye(2).to_sparse(), note),
        "lazy tensors": (torch.ones(2, device="meta"), torch.ones(2, dtype=torch.cfloat).conj()),
        "subclasses of tensors": (shared.as_subclass(Plain), shared.as_subclass(OwnReduction)),
        "storage": (torch.arange(3.0).untyped_storage(), torch.channels_last, torch.strided),
        "dataclasses": (Batch(shared, extra={"a": shared}), Frozen((1, 2), shared)),
        "named tuple": Point(shared, 2),
        "enum": [Colour.RED, {Colour.RED: 1}, enum.IntFlag],
        "classes": (Meta, WithMeta, int, nn.Linear, Batch, Colour, type, type(None), list[int]),
        "objects": (WithMeta(), Reduced(), Slots(shared), StateOnly(), Child(a=shared)),
        "functions": (importable.plain, len, "".join, torch.add, torch.ops.aten.add, Tensor.add),
        "methods": (importable.Derived().method, importable.Derived.make, functools.partial(max)),
        "module": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        "ordered": collections.OrderedDict(a=1, b=shared),
        "default": collections.defaultdict(list, a=[shared]),
        "torch": (torch.float32, torch.device("cpu"), torch.Size([2]), torch.finfo(torch.half)),
        "errors": (ValueError("x", shared), KeyError(1)),
        "others": (
            range(3),
            slice(1),
            Ellipsis,
            collections.Counter("aab"),
            collections.deque([1]),
        ),
        "scripted": torch.jit.script(nn.ReLU()),
        "large": ["x" * 70_000, b"y" * 70_000, bytearray(70_000), np.ones((200, 200)).T[:, ::2]],
        "arrays": (np.ones((200, 200)), np.asfortranarray(np.ones((200, 200))), np.float32(1)),
        "nested": [Nested([shared, 1]), shared, Nested({"key": Nested(shared)})],
    }


def picture(value: Any) -> Any:
    """Returns the bytes and the tensors of a packed value, in a form that can be compared."""
    packed = pack(value, main_by_name=True)
    return packed.payload, [(type(each), tuple(each.shape)) for each in packed.tensors]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", many_kinds())
def test_every_kind_of_object_arrives_and_packs_the_same_again(kind: str) -> None:
    arrived = object_trip(many_kinds()[kind])
    if kind not in ("scripted", "nested", "objects"):  # Their bytes differ each time.
        assert picture(arrived) == picture(object_trip(arrived))


@pytest.fixture
def own_table(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns copyreg's table; the test's changes are undone."""
    before = dict(copyreg.dispatch_table)
    yield copyreg.dispatch_table
    copyreg.dispatch_table.clear()
    copyreg.dispatch_table.update(before)


def reduced_to(text: str) -> Any:
    return lambda value: (str, (text,))


@pytest.mark.parametrize("value", [Reduced(), torch.ones(1).as_subclass(OwnReduction)])
def test_reducers_of_copyreg_count_from_their_registration_on(value: Any, own_table: Any) -> None:
    before = object_trip([value])
    assert before != ["first"]
    for text in ("first", "second"):  # The second one replaces the first one.
        own_table[type(value)] = reduced_to(text)
        assert object_trip([value]) == [text]
    del own_table[type(value)]
    assert object_trip([value]) == before


class Failing:
    def __reduce__(self) -> Any:
        raise ValueError("not now")


@frees_functions
def test_packing_keeps_nothing_of_a_message(handle_type: type) -> None:
    class Local:
        pass

    def kept(value: Any, by_value: bool = False) -> list[weakref.ref[Any]]:
        pack(value, main_by_name=True)
        return [weakref.ref(each) for each in value]

    found = kept([torch.ones(1), importable.Derived(), handle_type(), nn.Linear(1, 1)])
    found += kept([Local(), Local, lambda: 1])
    with pytest.raises(SerializationError):
        pack([Failing(), threading.Lock()], main_by_name=True)
    del Local
    gc.collect()
    assert [each() for each in found] == [None] * len(found)


def test_threads_pack_at_the_same_time() -> None:
    barrier, wrong = threading.Barrier(8), list[object]()

    def work(number: int) -> None:
        barrier.wait()
        for count in range(100):
            tensor = torch.full((2,), float(number))
            value = [number, Nested([tensor, count]), {"key": Batch(tensor, str(number))}, Slow()]
            packed = pack(value, main_by_name=True)
            first, inner, last, _ = unpack(packed.payload, packed.tensors, [])  # type: ignore[misc]
            if (first, inner[1], last["key"].label) != (number, count, str(number)):
                wrong.append((number, first))
            if [each for each in packed.tensors if each[0] != number]:
                wrong.append(packed.tensors)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Slow:
    def __reduce__(self) -> Any:
        time.sleep(0)  # Another thread may run in the middle of a dump.
        return Slow, ()


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_class_whose_module_was_loaded_again_goes_by_value(
    monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    value = importable.Pair(torch.ones(2), 1)
    assert type(object_trip(value)) is importable.Pair
    assert functions.name_of(importable.Pair, main_by_name=True) is not None  # It is kept.
    if is_removed:
        monkeypatch.delattr(importable, "Pair")
    else:
        monkeypatch.setattr(importable, "Pair", type("Pair", (), {}))
    arrived: Any = object_trip(value)
    assert arrived.y == 1
    assert arrived.x.tolist() == [1, 1]


def test_packing_leaves_no_circle_that_keeps_tensors() -> None:
    gc.collect()
    gc.disable()
    try:
        tensor = torch.ones(2)
        ended = weakref.ref(tensor)
        assert pack(Batch(tensor), main_by_name=True).tensors[0] is tensor
        del tensor
        assert ended() is None
    finally:
        gc.enable()
