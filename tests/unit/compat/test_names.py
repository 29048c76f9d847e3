"""Tests that Weft's modules have PyTorch's names, but for those that the manual lists.

``used_names.csv`` has the names that public libraries and programs take from these modules, and
who takes them. They must all be there. Of all other names of PyTorch's modules, those that are not
there stand in a table of ``docs/migration.md``, with the reason.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, get_args

import pytest

import torchweft.compat
from tests.tables import cases
from torchweft.compat import rpc
from torchweft.compat.installing import MODULES, NAMES
from torchweft.compat.rpc import api, names
from torchweft.compat.rpc.backend_registry import register_backend
from torchweft.errors import NotSupported

pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")

PAGE = Path(__file__).parents[3] / "docs" / "migration.md"
USED = Path(__file__).with_name("used_names.csv")
BEGIN, END = "<!-- begin: names that are not there -->", "<!-- end: names that are not there -->"

GONE = {"torch.distributed.rpc.ProcessGroupRpcBackendOptions"}
"""Used names that PyTorch itself no longer has."""

HOMES = (
    "torch._C._distributed_",
    "torch.distributed.autograd",
    "torch.distributed.nn.api.remote_module",
    "torch.distributed.optim.optimizer",
    "torch.distributed.rpc",
)
"""Prefixes of the modules that define what these modules are about; the rest is imported there."""


def both(name: str) -> tuple[ModuleType, ModuleType]:
    torchweft.compat.uninstall()
    stock, ours = importlib.import_module(name), importlib.import_module(MODULES[name])
    assert stock is not ours
    return stock, ours


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def is_own(value: Any) -> bool:
    home = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
    return not isinstance(home, str) or home.startswith(HOMES)


def own_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yields the names of a PyTorch module, without its imports from other packages."""
    for name, value in vars(module).items():
        is_for_types = isinstance(value, (TypeVar, ParamSpec)) or name == "TYPE_CHECKING"
        if is_own(value) and not is_special(name) and not is_for_types:
            yield name, value


def missing(name: str) -> set[str]:
    """Returns the names, and the attributes of classes, that only PyTorch's module has."""
    stock, ours = both(name)
    found = set()
    for each, value in own_names(stock):
        if not hasattr(ours, each):
            found.add(each)
        elif isinstance(value, type) and each != "_server_process_global_profile":  # makes none
            theirs = instance_names(getattr(ours, each))
            found |= {
                f"{each}.{attribute}"
                for attribute in dir(value)
                if not is_special(attribute)
                and attribute not in theirs
                and not attribute.startswith("_pybind11")
            }
    return found


def has(holder: Any, name: str) -> bool:
    """Returns whether a module has a name, or an attribute of a class of its own."""
    try:
        operator.attrgetter(name)(holder)
    except AttributeError:
        return False
    return True


def instance_names(kind: Any) -> set[str]:
    """Returns the names of the attributes of a class, and of those that its instances get."""
    found = set(dir(kind))
    for base in getattr(kind, "__mro__", ()):
        found |= set(vars(base).get("__annotations__", ()))
        code = getattr(vars(base).get("__init__"), "__code__", None)
        found |= set(code.co_names) if code is not None else set()
    return found


def rows() -> dict[str, dict[str, str]]:
    """Returns the table of the manual: by module, the names that are not there and the reasons."""
    text = PAGE.read_text()
    table = text[text.index(BEGIN) : text.index(END)]
    found: dict[str, dict[str, str]] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            (module,) = re.findall("`([^`]+)`", cells[0])
            names = re.findall("`([^`]+)`", cells[1])
            found.setdefault(module, {}).update(dict.fromkeys(names, cells[2]))
    return found


def used() -> list[str]:
    with USED.open(newline="") as file:
        return [row["name"] for row in csv.DictReader(file)]


def find(name: str, modules: dict[str, str]) -> Any:
    """Returns what a dotted name means, where ``modules`` stand in for PyTorch's."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            value: Any = importlib.import_module(modules.get(module, module))
        except ModuleNotFoundError:
            continue
        for holder, source, replaced in NAMES:
            if modules and holder == module and parts[length:][:1] == [replaced]:
                value = importlib.import_module(modules.get(source, source))
        for part in parts[length:]:
            value = getattr(value, part)
        return value
    raise AssertionError(name)


@cases("name", sorted(MODULES))
def test_every_name_is_there_or_in_the_table_of_the_manual(name: str) -> None:
    listed = rows().get(name, {})
    # The table is for all versions of PyTorch, some of which have renamed private names.
    assert missing(name) == {each for each in listed if has(both(name)[0], each)}
    assert all(listed.values()), "each row has a reason"


def test_the_table_of_the_manual_has_no_other_module() -> None:
    assert set(rows()) <= set(MODULES)


@cases("name", used())
def test_what_programs_import_is_there_and_of_the_same_kind(name: str) -> None:
    torchweft.compat.uninstall()
    if name in GONE:
        with pytest.raises(AttributeError):
            find(name, {})
        return
    theirs, ours = find(name, {}), find(name, MODULES)
    assert callable(theirs) == callable(ours)
    if isinstance(theirs, type):
        assert isinstance(ours, type)
    parameters = parameters_of(theirs)
    if parameters is not None:
        mine = parameters_of(ours)
        assert mine is not None
        assert accepts(mine, parameters), (mine, parameters)


def parameters_of(thing: Any) -> list[inspect.Parameter] | None:
    """Returns the parameters of a function or class that is written in Python."""
    try:
        found = list(inspect.signature(thing).parameters.values())
    except (TypeError, ValueError):
        return None
    return found if callable(thing) else None


def accepts(mine: list[inspect.Parameter], theirs: list[inspect.Parameter]) -> bool:
    """Whether a call that fits PyTorch's parameters fits Weft's, by position and by name."""
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in (*mine, *theirs)):
        return True
    public = [each.name for each in theirs if not each.name.startswith("_")]
    return [each.name for each in mine][: len(public)] == public


def test_star_imports_bring_what_pytorchs_do() -> None:
    stock, ours = both("torch.distributed.rpc")
    # Only a test of PyTorch's imports these two names from there.
    assert set(stock.__all__) <= set(ours.__all__) | {"method_factory", "new_method"}
    assert all(hasattr(ours, name) for name in ours.__all__)


def test_constants_have_the_same_values() -> None:
    stock, ours = both("torch.distributed.rpc.constants")
    for name, _ in own_names(stock):
        assert getattr(ours, name) == getattr(stock, name), name


def test_dir_lists_what_is_looked_up_elsewhere() -> None:
    assert {"BackendType", "init_rpc"} <= set(dir(rpc))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = rpc.no_such_name


def test_the_enumeration_is_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchweft.compat.rpc import backend_registry

    monkeypatch.setattr(backend_registry, "BackendType", rpc.BackendType)
    register_backend("NEWEST", dict, dict)
    assert rpc.BackendType is backend_registry.BackendType
    assert rpc.BackendType.NEWEST.name == "NEWEST"


@cases("name", sorted({**names.FUNCTIONS, **names.MEMBERSHIP}))
def test_what_has_no_meaning_says_so_when_it_is_called(name: str) -> None:
    function: Any = getattr(rpc, name, None) or getattr(api, name)
    with pytest.raises(NotSupported, match=f"Weft has no {name}: ") as caught:
        function(1, 2, key=3)
    assert isinstance(caught.value, RuntimeError)


def test_profilers_of_other_workers_say_so_when_they_are_made() -> None:
    for holder in (rpc, rpc.server_process_global_profiler):
        with pytest.raises(NotSupported, match="a profiler that runs there"):
            holder._server_process_global_profile(enabled=True)
    with pytest.raises(NotSupported, match="a profiler that runs there"):
        rpc.RemoteProfilerManager.set_current_profiling_key("key")


def test_there_are_no_objects_of_a_c_agent_to_free() -> None:
    for holder in (rpc, api):
        holder._cleanup_python_rpc_handler()  # type: ignore[attr-defined]


def test_references_fit_into_annotations() -> None:
    assert get_args(rpc.RRef[int]) == (int,)
    assert isinstance(rpc.PyRRef, type)
    assert issubclass(rpc.RRef, rpc.PyRRef)
