from __future__ import annotations

import functools
import math
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tables import cases
from tests.unit.engine.codec import importable
from torchweft.engine.codec import functions
from torchweft.engine.codec.functions import name_of, resolve
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

BY_VALUE = {
    "lambda": lambda: 1,
    "partial": functools.partial(importable.plain),
    "method of an object": importable.Base().method,
    "builtin method of an object": [].append,
    "callable object": importable.Unhashable(),
}


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
