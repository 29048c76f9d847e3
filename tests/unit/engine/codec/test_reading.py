"""Tests how trusting, allowing and strict workers read the same messages."""

from __future__ import annotations

import copyreg
import functools
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from tests.tables import cases
from tests.unit.engine.codec import admitted
from tests.unit.engine.codec.trips import tensor_trip
from torchweft.engine.codec import functions, objects
from torchweft.engine.codec.exceptions import pack_error
from torchweft.engine.codec.objects import pack, pack_plain
from torchweft.engine.codec.reading import TRUSTING, Reader, make_reader
from torchweft.engine.codec.tracebacks import places_of
from torchweft.errors import (
    CallError,
    NotAllowed,
    RemoteError,
    SerializationError,
)

ALLOWING = make_reader(["torch", admitted.__name__], False, "ps")
STRICT = make_reader(None, True, "ps")
REGISTERED = make_reader(None, True, "ps", [admitted.add, admitted.Odd])

pytestmark = pytest.mark.usefixtures("twin")


def trip(value: Any, reader: Reader = ALLOWING) -> Any:
    packed = pack(value, main_by_name=True)
    return reader.unpack(packed.payload, tensor_trip(*packed.tensors), packed.externals)


def test_a_reader_with_restrictions_replaces_all_that_trusts() -> None:
    trusting = {name for name in vars(Reader) if not name.startswith("__")}
    # What is made without pickle runs no code of a program, and gets classes by the reader's rules.
    of_allow_list = {"is_strict", "check_called", "make"}
    for reader, inherited in ((ALLOWING, of_allow_list), (STRICT, set())):
        own = {name for kind in type(reader).__mro__[:2] for name in vars(kind)}
        assert trusting - own == inherited


# Values that programs send


class _Model:
    def __init__(self) -> None:
        self.hook = admitted.add


def test_objects_of_other_classes_do_not() -> None:
    with pytest.raises(NotAllowed, match="_Model"):
        trip(([_Model()],))


# Attacks


class Calls:
    """Is pickled as the given call."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.call = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "was_here"


ATTACKS: dict[str, Callable[[str], Any]] = {
    "os.system": lambda path: Calls(os.system, f"touch {path}"),
    "in a dict": lambda path: {"deep": [Calls(os.system, f"touch {path}")]},
    "eval": lambda path: Calls(eval, f"open({path!r}, 'w')"),
    "open": lambda path: Calls(open, path, "w"),
    "import": lambda path: Calls(__import__, "os"),
    "getattr": lambda path: Calls(getattr, admitted.Model, "run"),
    "reexported": lambda path: Calls(admitted.system, f"touch {path}"),
    "partial": lambda path: Calls(functools.partial(os.system, f"touch {path}")),
    "partial of an allowed module": lambda path: Calls(admitted.run_anything, f"touch {path}"),
    "by value": lambda path: lambda: os.system(f"touch {path}"),
    "a bound method": lambda path: Path(path).touch,
    "a thread": lambda path: Calls(threading.Thread, None, os.system, None, (f"touch {path}",)),
    "a module": lambda path: os,
    "names": lambda path: Calls(functions.resolve, b"posix:system"),
    "another pickle": lambda path: Calls(pickle.loads, pickle.dumps(Calls(os.system, "true"))),
    "torch.load": lambda path: Calls(torch.load, path),
    "an exception": lambda path: ValueError(Calls(os.system, f"touch {path}")),
    "a code object": lambda path: (lambda: None).__code__,
    "a namespace": lambda path: types.SimpleNamespace(a=1),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_refused_and_do_nothing(attack: str, target: Path) -> None:
    value = ATTACKS[attack](str(target))
    try:
        payload = objects._pickled(value, main_by_name=True).payload
    except Exception:
        payload = pack((value,), main_by_name=True).payload
    for reader in (ALLOWING, STRICT, REGISTERED):
        with pytest.raises(NotAllowed) as caught:
            reader.unpack(payload, (), ())
        assert caught.value.worker == "ps"
    assert not target.exists()


@pytest.mark.parametrize("reader", [ALLOWING, STRICT, REGISTERED])
def test_a_path_is_a_value_whose_methods_others_may_not_call(reader: Reader, target: Path) -> None:
    payload = pack_plain([target, PurePosixPath("x/y")], main_by_name=True).payload
    assert reader.unpack(payload, (), ()) == [target, PurePosixPath("x/y")]
    with pytest.raises(NotAllowed):
        reader.method_of(target, "touch")
    with pytest.raises(NotAllowed):
        reader.method_of(target, "with_name")


def test_the_attacks_work_where_nothing_is_restricted(target: Path) -> None:
    attacks = ("os.system", "in a dict", "reexported", "partial")
    for attack in attacks:
        payload = objects._pickled(ATTACKS[attack](str(target)), main_by_name=True).payload
        TRUSTING.unpack(payload, (), ())
        assert target.exists(), attack
        target.unlink()


NAME = f"{admitted.__name__}"


def named(path: str) -> bytes:
    module, name = NAME.encode(), path.encode()
    return (
        pickle.SHORT_BINUNICODE
        + bytes((len(module),))
        + module
        + pickle.SHORT_BINUNICODE
        + bytes((len(name),))
        + name
        + pickle.STACK_GLOBAL
    )


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes((len(value),)) + value.encode()


PROTO = pickle.PROTO + b"\x05"
CHANGES = {
    "attributes of a class": named("Model")
    + pickle.NONE
    + pickle.EMPTY_DICT
    + text("scale")
    + named("add")
    + pickle.SETITEM
    + pickle.TUPLE2
    + pickle.BUILD,
    "attributes of a function": named("add")
    + pickle.EMPTY_DICT
    + text("mark")
    + pickle.NEWTRUE
    + pickle.SETITEM
    + pickle.BUILD,
    "a dict, by its name": pickle.GLOBAL
    + b"torchweft.engine.codec.functions\nresolve\n"
    + pickle.SHORT_BINBYTES
    + bytes((len(NAME) + 9,))
    + f"{NAME}:settings".encode()
    + pickle.TUPLE1
    + pickle.REDUCE
    + text("debug")
    + pickle.NEWTRUE
    + pickle.SETITEM,
    "a dict": named("settings") + text("debug") + pickle.NEWTRUE + pickle.SETITEM,
    "a dict, by several": named("settings")
    + pickle.MARK
    + text("debug")
    + pickle.NEWTRUE
    + pickle.SETITEMS,
    "a list": named("changed") + text("x") + pickle.APPEND,
    "a list, by several": named("changed") + pickle.MARK + text("x") + pickle.APPENDS,
    "a list, as a set": named("changed") + pickle.MARK + text("x") + pickle.ADDITEMS,
}


@cases("change", CHANGES)
def test_a_pickle_cannot_change_what_it_names(change: str) -> None:
    payload = PROTO + CHANGES[change] + pickle.STOP
    before = (admitted.Model.scale, dict(vars(admitted.add)), dict(admitted.settings))
    with pytest.raises(SerializationError, match="would change"):
        ALLOWING.unpack(payload, (), ())
    assert before == (admitted.Model.scale, vars(admitted.add), admitted.settings)
    assert admitted.changed == []


def test_the_numbers_of_copyreg_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    copyreg.add_extension("posix", "system", 200)
    try:
        with pytest.raises(SerializationError, match="extension"):
            ALLOWING.unpack(PROTO + pickle.EXT1 + b"\xc8" + pickle.STOP, (), ())
    finally:
        copyreg.remove_extension("posix", "system", 200)


def test_a_tensor_is_not_made_of_something_else() -> None:
    from torchweft.engine.codec import reducers

    for call in (
        Calls(reducers._as_subclass, admitted.Model(), admitted.Model),
        Calls(reducers.set_attributes, admitted.Model(), {"scale": 1}),
    ):
        with pytest.raises(Exception, match="a message makes a tensor"):
            trip((call,))


# Strict workers


def test_a_strict_worker_reads_plain_values() -> None:
    value = {"a": [1, (2.5, torch.ones(2))], "f": admitted.add}
    packed = pack_plain(value, main_by_name=True)
    for reader in (TRUSTING, ALLOWING, REGISTERED):
        arrived = reader.unpack(packed.payload, tensor_trip(*packed.tensors), ())
        assert arrived["a"][1][1].tolist() == [1.0, 1.0]
        assert arrived["f"] is admitted.add


# Arrays of numpy, read with an allow-list


class Dtype:
    """A dtype that hides that it contains objects."""

    def __reduce__(self) -> Any:
        fields = {"a": (np.dtype("O"), 0)}
        return np.dtype, ("V8", False, True), (3, "|", None, ("a",), fields, 8, 1, 0)


class ObjectDtype:
    def __reduce__(self) -> Any:
        return np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0)


class Array:
    """Is pickled as an array of objects whose content is given as bytes."""

    def __init__(self, kind: object) -> None:
        self._kind = kind

    def __reduce__(self) -> Any:
        made: Any = np.zeros(0).__reduce_ex__(4)
        return made[0], made[1], (1, (1,), self._kind, False, b"A" * 8)


@pytest.mark.parametrize(
    "attack",
    [
        Calls(np.ndarray, (1,), "O", b"A" * 8),
        Array(np.dtype("O")),
        Array(Dtype()),
        Array(ObjectDtype()),
        Calls(np.zeros(0).__reduce_ex__(4)[0], np.matrix, (0,), b"b"),
        Calls(np.float64(1).__reduce__()[0], np.dtype("O"), b"A" * 8),
        Calls(np.ones(1).__reduce_ex__(5)[0], b"A" * 8, np.dtype("O"), (1,), "C"),
    ],
)
def test_bytes_do_not_become_addresses(attack: object) -> None:
    payload = pickle.dumps([attack], 4)
    with pytest.raises((NotAllowed, SerializationError)):
        ALLOWING.unpack(payload, (), ())


@cases(
    "value",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.ones((2, 3))),
        np.array(["ab", "c"]),
        np.array([1, None], dtype=object),
        np.array([[[1], None, "x"]], dtype=object).T,
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.arange(3, dtype=">i4"),
        np.zeros(0),
        np.float32(3),
        np.datetime64("2020-01-01"),
        np.str_("text"),
    ],
)
def test_arrays_are_read_as_they_were(value: Any) -> None:
    arrived = trip([value])[0]
    assert type(arrived) is type(value)
    assert arrived.dtype == value.dtype
    assert np.array_equal(arrived, value)


# Errors


def failing(error: Exception) -> Exception:
    try:
        raise error
    except Exception as raised:
        return raised


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("reader", [TRUSTING, ALLOWING, REGISTERED])
def test_errors_that_may_be_named_keep_their_type(reader: Reader, is_plain: bool) -> None:
    if reader is REGISTERED and not is_plain:
        return
    for error in (
        KeyError("k", 3),
        admitted.Odd("odd"),
        CallError("no", worker="w", elapsed_s=2.0),
        FileNotFoundError(2, "nothing", "/there"),
    ):
        arrived = reader.unpack_error(pack_error(failing(error), "w", is_plain=is_plain))
        assert type(arrived) is type(error)
        assert str(arrived) == str(error)
        assert arrived.args == error.args
        assert "in failing" in places_of(arrived)[0]


@pytest.mark.parametrize("is_plain", [False, True])
def test_an_error_carries_nothing_that_runs_when_it_is_shown(is_plain: bool) -> None:
    error: Any = ImportError("no", name="this")
    error.name_from = error.kept = "d"
    vars(error)["__len__"] = 3
    reader = REGISTERED if is_plain else TRUSTING
    arrived: Any = reader.unpack_error(pack_error(error, "w", is_plain=is_plain))
    assert type(arrived) is ImportError
    assert (arrived.name, arrived.kept) == ("this", "d")
    # Python 3.12 and later import the module to find a similar name.
    assert getattr(arrived, "name_from", None) is None
    assert "__len__" not in vars(arrived)


def test_what_an_error_carries_is_checked_too(target: Path) -> None:
    error: Any = ValueError(Calls(os.system, f"touch {target}"))
    error.note = Calls(os.system, f"touch {target}")
    arrived = ALLOWING.unpack_error(pack_error(error, "w"))
    assert not target.exists()
    assert "ValueError" in str(arrived) or isinstance(arrived, ValueError)


def test_an_error_type_cannot_have_a_module_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_errors.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    content = pack_error(admitted.Odd("x"), "w").replace(
        admitted.__name__.encode(), b"bad_errors".ljust(len(admitted.__name__), b"x")
    )
    assert isinstance(ALLOWING.unpack_error(content), ValueError)
    record = ("bad", "t", (("bad_errors", "E"),), True, ("bad_errors", "E"), None, None)
    record += ((), {}, (), None, None, False)
    content = pack_plain(("w", [record]), main_by_name=True).payload
    assert isinstance(ALLOWING.unpack_error(content), RemoteError)
    assert isinstance(TRUSTING.unpack_error(content), RemoteError)
    assert (tmp_path / "ran").exists()  # the trusting worker imported it
    del sys.modules["bad_errors"]
