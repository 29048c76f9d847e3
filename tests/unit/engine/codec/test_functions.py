from __future__ import annotations

import functools
import gc
import math
import signal
import sys
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from tests.tables import cases
from tests.unit.engine.codec import importable
from torchweft.engine.codec import functions
from torchweft.engine.codec.functions import describe, name_of, resolve
from torchweft.engine.codec.objects import pack, unpack
from torchweft.errors import UnknownFunction

HERE = "tests.unit.engine.codec.importable"

BY_NAME = {
    "function": (importable.plain, f"{HERE}:plain"),
    "class": (importable.Base, f"{HERE}:Base"),
    "inner class": (importable.Base.Inner, f"{HERE}:Base.Inner"),
    "static method": (importable.Base.double, f"{HERE}:Base.double"),
    "method of the class": (importable.Base.method, f"{HERE}:Base.method"),
    "class method": (importable.Base.make, f"{HERE}:Base.make"),
    "inherited class method": (importable.Derived.make, f"{HERE}:Derived.make"),
    "lru_cache": (importable.cached, f"{HERE}:cached"),
    "decorated": (importable.decorated, f"{HERE}:decorated"),
    "builtin": (len, "builtins:len"),
    "module builtin": (math.sqrt, "math:sqrt"),
    "type method": (str.join, "builtins:str.join"),
    "type class method": (dict.fromkeys, "builtins:dict.fromkeys"),
    "torch.add": (torch.add, "torch:add"),
    "torch.linalg.norm": (torch.linalg.norm, "torch._C._linalg:linalg_norm"),
    "torch.relu": (torch.nn.functional.relu, "torch.nn.functional:relu"),
    "Tensor.add": (torch.Tensor.add, "torch._C:TensorBase.add"),
    "packet": (torch.ops.aten.add, "torch:ops.aten.add"),
    "overload": (torch.ops.aten.add.Tensor, "torch:ops.aten.add.Tensor"),
    "module": (torch.nn.Linear, "torch.nn.modules.linear:Linear"),
    "scripted": (importable.scripted, f"{HERE}:scripted"),
    "scripted, renamed": (importable.renamed, f"{HERE}:renamed"),
}

captured = 3
BY_VALUE = {
    "lambda": lambda: 1,
    "partial": functools.partial(importable.plain),
    "method of an object": importable.Base().method,
    "builtin method of an object": [].append,
    "callable object": importable.Unhashable(),
}


def test_operators_of_a_program_go_by_the_name_of_their_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.__module__, twice.__qualname__ = HERE, "twice"
    twice.__annotations__ = {"x": torch.Tensor, "return": torch.Tensor}
    operator: Any = torch.library.custom_op("weft_test::twice", twice, mutates_args=())
    assert name_of(operator, main_by_name=True) is None
    monkeypatch.setattr(importable, "twice", operator, raising=False)
    name = name_of(operator, main_by_name=False)
    assert name == f"{HERE}:twice".encode()
    assert resolve(name) is operator
    packed = pack([operator], main_by_name=False)
    assert unpack(packed.payload, [], []) == [operator]


@cases("case", BY_NAME)
def test_importable_callables_go_by_name_and_back(case: str) -> None:
    function, expected = BY_NAME[case]
    for _ in range(2):  # the second time from the cache
        name = name_of(function, main_by_name=False)
        assert name == expected.encode()
        assert resolve(name) == function


@pytest.mark.parametrize("case", BY_VALUE)
def test_callables_without_a_name_go_by_value(case: str) -> None:
    assert name_of(BY_VALUE[case], main_by_name=True) is None


def test_closures_and_shadowed_functions_go_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def local() -> None:
        pass

    assert name_of(local, main_by_name=True) is None
    replaced = types.FunctionType(importable.plain.__code__, vars(importable), "plain")
    replaced.__module__ = HERE
    assert name_of(replaced, main_by_name=True) is None


@pytest.mark.parametrize("module", ["__main__", "__mp_main__"])
def test_the_main_program_goes_by_name_where_both_run_it(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = types.ModuleType(module)
    exec("def work(): return 'done'", vars(main))
    monkeypatch.setitem(sys.modules, module, main)
    monkeypatch.setitem(sys.modules, "__main__", main)
    work: Any = vars(main)["work"]
    assert name_of(work, main_by_name=False) is None
    assert name_of(work, main_by_name=True) == b"__main__:work"
    assert name_of(work, main_by_name=False) is None
    assert resolve(b"__main__:work")() == "done"


def test_a_module_registered_with_cloudpickle_goes_by_value() -> None:
    def fresh() -> None:
        pass

    fresh.__qualname__ = fresh.__name__ = "fresh_function"
    fresh.__module__ = HERE
    importable.fresh_function = fresh  # type: ignore[attr-defined]
    cloudpickle.register_pickle_by_value(importable)
    try:
        assert name_of(fresh, main_by_name=True) is None
    finally:
        cloudpickle.unregister_pickle_by_value(importable)
        del importable.fresh_function  # type: ignore[attr-defined]


def test_a_function_replaced_in_its_module_is_found_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"{HERE}:plain".encode()
    assert resolve(name) is importable.plain
    monkeypatch.setattr(importable, "plain", importable.decorated)
    assert resolve(name) is importable.decorated


def test_names_are_forgotten_with_their_functions() -> None:
    def temporary() -> None:
        pass

    temporary.__qualname__ = "temporary"
    temporary.__module__ = HERE
    importable.temporary = temporary  # type: ignore[attr-defined]
    assert name_of(temporary, main_by_name=True) is not None
    key, alive = id(temporary), weakref.ref(temporary)
    assert key in functions._names
    del importable.temporary, temporary  # type: ignore[attr-defined]
    gc.collect()
    assert alive() is None
    assert key not in functions._names


@cases(
    ("name", "parts"),
    [
        (b"no_such_module_here:work", ["no_such_module_here", "'work'", "PYTHONPATH"]),
        (f"{HERE}:no_such".encode(), [HERE, "'no_such'", "top level"]),
        (f"{HERE}:Base.no_such".encode(), [HERE, "Base.no_such"]),
        (f"{HERE}:NoClass.method".encode(), ["NoClass"]),
        (b"__main__:no_such_function", ["main programs", "'no_such_function'"]),
        (b"nonsense", ["nonsense", "module:name"]),
        (b":", ["module:name"]),
        (b"\xff\xfe:x", ["xff"]),
        (b"torch:ops.aten.no_such_operator", ["no_such_operator"]),
    ],
)
def test_a_function_that_is_missing_is_named_with_advice(name: bytes, parts: list[str]) -> None:
    with pytest.raises(UnknownFunction) as caught:
        resolve(name)
    assert all(part in str(caught.value) for part in parts)
    assert isinstance(caught.value, AttributeError)


def test_a_module_that_fails_to_import_says_why(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_on_import.py").write_text("raise ValueError('bad configuration')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownFunction, match="ValueError: bad configuration"):
        resolve(b"broken_on_import:work")


@cases(
    ("function", "text"),
    [
        (torch.add, "torch.add"),
        (importable.plain, f"{HERE}.plain"),
        (torch.ops.aten.add.Tensor, "torch.ops.aten.add.Tensor"),
        (functools.partial(importable.plain), f"partial({HERE}.plain)"),
        (importable.Unhashable(), f"{HERE}.Unhashable object"),
        (importable.Base().method, f"{HERE}.Base.method"),
        (BY_VALUE["lambda"], "test_functions.<lambda>"),
        (42, "builtins.int object"),
    ],
)
def test_any_callable_can_be_described(function: object, text: str) -> None:
    assert describe(function).endswith(text)


def test_what_pytorch_wraps_goes_by_the_name_that_is_left() -> None:
    """Importing torch._dynamo replaces ``torch.manual_seed`` by a wrapper of the original."""
    import torch._dynamo

    assert torch._dynamo is not None
    assert torch.manual_seed is not torch.random.manual_seed
    name = name_of(torch.manual_seed, main_by_name=False)
    assert name is not None
    assert resolve(name) is torch.manual_seed


@pytest.mark.parametrize("path", ["add_onee", "Adder.nam", "Adderr.name"])
def test_an_unknown_name_is_told_with_the_nearest(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("typing_errors")
    module.add_one = len  # type: ignore[attr-defined]
    module.Adder = type("Adder", (), {"name": staticmethod(len)})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(UnknownFunction, match=r"did you mean '(add_one|name|Adder)'\?"):
        resolve(f"typing_errors:{path}".encode())


CIRCLE = {
    "__init__": "threading.package_began.set()\nthreading.part_began.wait(0.2)\n"
    "from circle import other",
    # Common in packages: each module imports the other, and one needs the other to be complete.
    "part": "threading.part_began.set()\nimport circle.other\ndef double(x): return 2 * x",
    "other": "from circle import part\ndouble = part.double",
}


def test_a_package_and_its_module_are_imported_by_two_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If two threads wait for each other's modules, Python gives one of them a partial module."""
    (tmp_path / "circle").mkdir()
    for name, body in CIRCLE.items():
        (tmp_path / "circle" / f"{name}.py").write_text(f"import threading\n{body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("package_began", "part_began"):
        monkeypatch.setattr(threading, name, threading.Event(), raising=False)

    def resolve_part() -> Any:
        assert threading.package_began.wait(20)  # type: ignore[attr-defined]
        return resolve(b"circle.part:double")

    with ThreadPoolExecutor(2) as pool:
        package = pool.submit(resolve, b"circle:other.double")
        part = pool.submit(resolve_part)
        assert package.result()(2) == part.result()(2) == 4


def test_functions_in_functions_have_no_name_unless_a_program_gives_them_one() -> None:
    def local() -> None: ...

    assert name_of(local, True) is None
    importable.local = local  # type: ignore[attr-defined]
    local.__module__ = importable.__name__
    try:
        assert name_of(local, True) == b"tests.unit.engine.codec.importable:local"
    finally:
        del importable.local  # type: ignore[attr-defined]


def test_an_error_of_a_signal_handler_during_an_import_arrives_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Alarm(Exception):
        pass

    def handler(*_: object) -> None:
        raise Alarm

    def load(module: str) -> object:
        signal.raise_signal(signal.SIGUSR1)
        return sys.modules[module]

    former = signal.signal(signal.SIGUSR1, handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(functions, "load_module", load)
            with pytest.raises(Alarm):
                functions.locate.__wrapped__(f"{HERE}:plain".encode())
    finally:
        signal.signal(signal.SIGUSR1, former)
