"""Tests the allow-list against one attack by name at a time."""

from __future__ import annotations

import collections
import functools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine.codec import admitted
from torchweft.engine.codec.functions import name_of
from torchweft.engine.codec.reading import AllowList
from torchweft.errors import NotAllowed, UnknownFunction

MODULE = admitted.__name__


@pytest.fixture
def allowed() -> AllowList:
    return AllowList([MODULE], "ps")


@pytest.fixture
def with_torch() -> AllowList:
    return AllowList(["torch", MODULE], "ps")


def name(path: str, module: str = MODULE) -> bytes:
    return f"{module}:{path}".encode()


# Names


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("add", admitted.add),
        ("_private", admitted._private),
        ("cached", admitted.cached),
        ("half", admitted.half),
        ("draw", admitted.draw),
        ("Model", admitted.Model),
        ("Model.scale", admitted.Model.scale),
        ("Model.double", admitted.Model.double),
        ("Model.make", admitted.Model.make),
        ("Model.__call__", admitted.Model.__call__),
        ("Model.Inner.name", admitted.Model.Inner.name),
    ],
)
def test_what_an_allowed_module_defines_is_found(
    allowed: AllowList, path: str, expected: object
) -> None:
    assert allowed.resolve(name(path)) == expected
    assert allowed.resolve(name(path)) == expected  # also from its cache


@pytest.mark.parametrize(
    "path",
    [
        "system",  # from os import system
        "os.system",
        "subprocess.Popen",
        "functools.partial",
        "torch.load",
        "os",
        "run_anything",  # a partial of os.system
        "operator",
        "Model.run",
        "Model.__init__.__globals__",
        "Model.__subclasses__",
        "Model.__reduce__",
        "Model.__class__",
        "Model.scale.__globals__.get",
        "add.__globals__.get",
        "add.__call__",
        "GREETING.format",
        "settings.update",
        "changed.append",
        "draw.__self__.seed",
        "__builtins__",
        "__builtins__.eval",
        "__loader__.get_data",
        "__dict__.get",
        "Worker.start",
        "Net.load_state_dict",
    ],
)
def test_what_only_passes_through_an_allowed_module_is_refused(
    allowed: AllowList, path: str
) -> None:
    with pytest.raises(NotAllowed) as caught:
        allowed.resolve(name(path))
    assert caught.value.worker == "ps"
    assert path in caught.value.refused
    assert "allowed_modules" in str(caught.value)
    assert "'ps'" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        b"os:system",
        b"posix:system",
        b"builtins:eval",
        b"builtins:getattr",
        b"operator:attrgetter",
        b"functools:partial",
        b"torchweft.engine.codec.functions:resolve",
        b"torchweft.engine.codec.reducers:_load_script",
        b"torchweft.errors:_rebuild_with_fields",
        b"torchweft.compat.rpc.internal:run_pickled",
        b"torchweft.rpc.joining:shutdown",
        f"{MODULE}x:add".encode(),
        b"tests.unit.engine.codec:admitted",
        b"tests:unit",
    ],
)
def test_other_modules_are_refused(allowed: AllowList, text: bytes) -> None:
    with pytest.raises(NotAllowed) as caught:
        allowed.resolve(text)
    assert caught.value.refused


@pytest.mark.parametrize(
    "text", [b"", b":", b"add", b"a:", b":add", b"a..b:c", b"a/b:c", b"\xff:x", b"a:b c", b"..:x"]
)
def test_what_is_no_name_is_unknown(allowed: AllowList, text: bytes) -> None:
    with pytest.raises(UnknownFunction):
        allowed.resolve(text)


def test_a_module_that_is_not_allowed_is_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: AllowList
) -> None:
    (tmp_path / "with_effects.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for find in (allowed.resolve, lambda text: allowed.find_global("with_effects", "f")):
        with pytest.raises(NotAllowed):
            find(b"with_effects:f")
    assert "with_effects" not in sys.modules
    assert not (tmp_path / "ran").exists()


def test_the_main_program_is_a_module_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", admitted)
    with pytest.raises(NotAllowed, match="__main__"):
        AllowList([MODULE], "ps").resolve(b"__main__:draw")
    assert AllowList(["__main__"], "ps").resolve(b"__main__:draw") is admitted.draw


def test_what_is_replaced_is_checked_again(
    allowed: AllowList, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert allowed.resolve(name("add")) is admitted.add
    monkeypatch.setattr(admitted, "add", admitted._private)
    assert allowed.resolve(name("add")) is admitted._private
    monkeypatch.setattr(admitted, "add", os.system)
    with pytest.raises(NotAllowed):
        allowed.resolve(name("add"))


def test_what_weft_itself_calls_needs_no_entry(allowed: AllowList) -> None:
    from torchweft.rpc import serving

    assert allowed.resolve(b"torchweft.rpc.serving:call_method") is serving.call_method


def test_the_advice_never_says_to_add_what_voids_the_list(allowed: AllowList) -> None:
    for text in (b"builtins:eval", b"torchweft.rpc.joining:shutdown"):
        with pytest.raises(NotAllowed) as caught:
            allowed.resolve(text)
        assert "add '" not in str(caught.value)
    with pytest.raises(NotAllowed, match=r"add 'torchweft\.checkpoint' to"):
        allowed.resolve(b"torchweft.checkpoint.owners:discard")
    with pytest.raises(NotAllowed, match="add 'posix' to"):
        allowed.resolve(b"posix:system")


def test_what_only_makes_a_value_needs_no_entry(allowed: AllowList) -> None:
    assert allowed.resolve(b"collections:OrderedDict") is collections.OrderedDict
    assert allowed.resolve(b"builtins:int") is int
    assert allowed.resolve(b"torch:device") is torch.device


# The entry "torch"


@pytest.mark.parametrize(
    "function",
    [
        torch.add,
        torch.conv2d,
        torch.Tensor.add,
        torch.Tensor.__add__,
        torch.Tensor.backward,
        torch.einsum,
        torch.linalg.vector_norm,
        torch.fft.fft,
        torch.manual_seed,
        torch.nn.Linear,
        torch.nn.functional.cross_entropy,
        torch.nn.functional.gelu,
        torch.optim.Adam,
        torch.distributions.Normal,
    ],
)
def test_torch_means_what_computes(with_torch: AllowList, function: Any) -> None:
    text = name_of(function, main_by_name=False)
    assert text is not None
    assert with_torch.resolve(text) == function
    with pytest.raises(NotAllowed):
        AllowList([MODULE], "ps").resolve(text)


@pytest.mark.parametrize(
    "text",
    [
        b"torch:load",
        b"torch.serialization:load",
        b"torch:save",
        b"torch:from_file",
        b"torch:compile",
        b"torch:hub",
        b"torch:hub.load",
        b"torch.hub:load",
        b"torch:os.system",
        b"torch:PyTorchFileWriter",
        b"torch._C:PyTorchFileWriter",
        b"torch._C:_jit_clear_class_registry",
        b"torch.utils.collect_env:run",
        b"torch.utils.cpp_extension:load_inline",
        b"torch.jit:load",
        b"torch:ops.load_library",
        b"torch:ops.aten.add",
        b"torch:classes.load_library",
        b"torch.multiprocessing:spawn",
        b"torch.nn.functional:importlib.import_module",
        b"torch.nn.functional:warnings.warn",
        b"torch:Tensor.__reduce_ex__",
        b"torch._C:TensorBase.__setattr__",
    ],
)
def test_torch_does_not_mean_what_reads_files_and_runs_commands(
    with_torch: AllowList, text: bytes
) -> None:
    with pytest.raises(NotAllowed):
        with_torch.resolve(text)


def test_operators_have_an_entry_of_their_own() -> None:
    operators = AllowList(["torch.ops"], "ps")
    assert operators.resolve(b"torch:ops.aten.add.Tensor") is torch.ops.aten.add.Tensor
    for text in (b"torch:ops.load_library", b"torch:ops.aten", b"torch:ops.import_module"):
        with pytest.raises(NotAllowed):
            operators.resolve(text)


# Globals of pickles


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("builtins", "getattr"),
        ("builtins", "eval"),
        ("os", "system"),
        ("cloudpickle.cloudpickle", "_make_function"),
        ("cloudpickle", "loads"),
        ("types", "CodeType"),
        ("types", "FunctionType"),
        ("torchweft.engine.codec.reducers", "_load_script"),
        ("torchweft.engine.codec.reducers", "register_reducer"),
        ("torchweft.engine.codec.reading", "AllowList"),
        (MODULE, "os.system"),
        (MODULE, "system"),
    ],
)
def test_globals_are_refused_like_names(allowed: AllowList, module: str, path: str) -> None:
    with pytest.raises(NotAllowed):
        allowed.find_global(module, path)


def test_a_function_by_value_is_refused_with_what_to_do(allowed: AllowList) -> None:
    with pytest.raises(NotAllowed, match="top level of a module"):
        allowed.find_global("cloudpickle.cloudpickle", "_make_function")


def test_globals_that_a_value_needs_are_found(allowed: AllowList) -> None:
    assert allowed.find_global("torch", "bfloat16") is torch.bfloat16
    assert allowed.find_global("torch", "channels_last") is torch.channels_last
    assert allowed.find_global("builtins", "KeyError") is KeyError
    assert allowed.find_global("torchweft.errors", "NotAllowed") is NotAllowed
    assert allowed.find_global(MODULE, "Odd") is admitted.Odd


def test_compiled_code_needs_an_entry() -> None:
    by_list = AllowList(["torch.jit"], "ps")
    assert callable(by_list.find_global("torchweft.engine.codec.reducers", "_load_script"))


# Methods


def test_methods_that_an_allowed_class_defines_may_be_called(allowed: AllowList) -> None:
    model = admitted.Model(3)
    assert allowed.method_of(model, "scale")(2) == 6
    assert allowed.method_of(model, "__call__")(2) == 6
    assert allowed.method_of(model, "__len__")() == 3
    assert allowed.method_of(model, "make")(4).value == 4
    assert allowed.method_of(model, "double")(4) == 8
    assert allowed.method_of(model, "hook")(1, 2) == 3
    assert allowed.method_of(admitted.Model, "make")(4).value == 4
    assert allowed.method_of(admitted.add, "__call__")(1, 2) == 3


@pytest.mark.parametrize(
    "method",
    [
        "_hidden",
        "__init__",
        "__class__",
        "__dict__",
        "__reduce_ex__",
        "__getattribute__",
        "__setattr__",
        "__delattr__",
        "__subclasshook__",
        "run",
        "bad_hook",
        "escape",
    ],
)
def test_other_methods_may_not(allowed: AllowList, method: str) -> None:
    model = admitted.Model()
    model.catch()
    with pytest.raises(NotAllowed) as caught:
        allowed.method_of(model, method)(0)
    assert method in caught.value.refused


def test_methods_from_a_class_that_is_not_allowed_may_not_be_called(allowed: AllowList) -> None:
    assert allowed.method_of(admitted.Worker(), "mine")() == 1
    for method in ("start", "run", "join"):
        with pytest.raises(NotAllowed, match="threading"):
            allowed.method_of(admitted.Worker(), method)


@pytest.mark.parametrize(
    "value", [os, os.system, os.environ, functools.partial(os.system), Path("/"), os.path.join]
)
def test_nothing_can_be_called_on_what_is_not_allowed(allowed: AllowList, value: object) -> None:
    for method in ("__call__", "system", "get", "exists", "__getitem__", "func"):
        with pytest.raises((NotAllowed, AttributeError)):
            allowed.method_of(value, method)()


def test_containers_tensors_and_modules_are_tame(allowed: AllowList) -> None:
    values = [1]
    allowed.method_of(values, "append")(2)
    assert values == [1, 2]
    assert allowed.method_of({"a": 1}, "__getitem__")("a") == 1
    assert float(allowed.method_of(torch.ones(2), "sum")()) == 2.0
    net = admitted.Net()
    assert allowed.method_of(net, "__call__")(torch.ones(1, 2)).shape == (1, 2)
    assert allowed.method_of(net, "layer")(torch.ones(1, 2)).shape == (1, 2)
    assert len(list(allowed.method_of(net, "parameters")())) == 2
    assert allowed.method_of(torch.nn.Linear(2, 2), "forward")(torch.ones(2)).shape == (2,)


def test_a_text_does_not_read_attributes(allowed: AllowList) -> None:
    text = "{0.__init__.__globals__}"
    for method in ("format", "format_map"):
        with pytest.raises(NotAllowed):
            allowed.method_of(text, method)
    assert allowed.method_of(text, "upper")() == text.upper()


def test_a_name_that_is_no_text_is_refused(allowed: AllowList) -> None:
    class Sly(str):
        def startswith(self, *_: Any) -> bool:
            return False

    for bad in (Sly("_hidden"), b"scale", 3):
        with pytest.raises(NotAllowed):
            allowed.method_of(admitted.Model(), bad)  # type: ignore[arg-type]
