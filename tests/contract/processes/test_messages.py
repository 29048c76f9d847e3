"""What users see when a call fails: one cause, once, without Weft's own frames."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.contract.processes.functions import Accumulator
from torchweft import autograd, rpc
from torchweft.errors import ArgumentTypeError, CallTimeout, ConfigurationError
from torchweft.launch import Cluster
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer

pytestmark = [
    pytest.mark.keeps("threads", "descriptors"),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 prints no notes"),
]


def divide(by: float) -> float:
    return 1 / by


def pass_through(to: str) -> float:
    return rpc.rpc_sync(to, divide, args=(0,))


def wrap(to: str) -> None:
    try:
        rpc.rpc_sync(to, divide, args=(0,))
    except ZeroDivisionError as error:
        raise ValueError("the division failed") from error


async def divide_soon(by: float) -> float:
    return 1 / by


def stop_for(event_s: float) -> None:
    threading.Event().wait(event_s)


class Slow:
    @property
    def broken(self) -> float:
        return self.nothing_of_that_name  # type: ignore[attr-defined, no-any-return]

    def stop_for(self, seconds: float) -> None:
        stop_for(seconds)


def make_slow() -> Any:
    return Slow()


def printed(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    raise AssertionError("nothing was raised")


def files_in(text: str) -> set[str]:
    return {line.split('"')[1] for line in text.splitlines() if line.lstrip().startswith('File "')}


WAYS: dict[str, Callable[[str], object]] = {
    "rpc_sync": lambda to: rpc.rpc_sync(to, divide, args=(0,)),
    "wait": lambda to: rpc.rpc_async(to, divide, args=(0,)).wait(),
    "to_here": lambda to: rpc.remote(to, divide, args=(0,)).to_here(),
    "async def": lambda to: rpc.rpc_sync(to, divide_soon, args=(0,)),
    "wait_all": lambda to: torch.futures.wait_all([rpc.rpc_async(to, divide, args=(0,))]),
}


@pytest.mark.parametrize("to", ["worker1", "driver"])
@pytest.mark.parametrize("way", list(WAYS))
def test_an_error_is_shown_once_with_the_frames_of_the_program(
    group: Cluster, way: str, to: str
) -> None:
    text = printed(lambda: WAYS[way](to))
    assert text.count("ZeroDivisionError: division by zero") == 1
    assert text.count("return 1 / by") == 1
    assert text.count(f'On worker "{to}":') == 1
    assert text.index("ZeroDivisionError") < text.index("return 1 / by")
    assert "Traceback" not in text[10:]
    own = {file for file in files_in(text) if "/torchweft/" in file}
    assert not own


def test_an_error_that_passes_two_workers_names_each_once(group: Cluster) -> None:
    text = printed(lambda: rpc.rpc_sync("worker0", pass_through, args=("worker1",)))
    assert text.count("ZeroDivisionError: division by zero") == 1
    assert text.count('On worker "worker1":') == text.count('On worker "worker0":') == 1
    assert text.index('On worker "worker1":') < text.index('On worker "worker0":')
    assert not {file for file in files_in(text) if "/torchweft/" in file}


def test_a_cause_is_shown_once(group: Cluster) -> None:
    text = printed(lambda: rpc.rpc_sync("worker0", wrap, args=("worker1",)))
    assert text.count("ZeroDivisionError: division by zero") == 1
    assert text.count("ValueError: the division failed") == 1
    assert text.count("return 1 / by") == 1
    assert text.count("direct cause") == 1
    assert not {file for file in files_in(text) if "/torchweft/" in file}


def test_a_wrong_call_names_the_function_and_no_frames(group: Cluster) -> None:
    text = printed(lambda: rpc.rpc_sync("worker1", divide))
    assert "divide() missing 1 required positional argument: 'by'" in text
    assert text.rstrip().endswith('On worker "worker1"')
    assert not {file for file in files_in(text) if "/torchweft/" in file}


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async"])
def test_a_late_method_is_named_with_its_reference(group: Cluster, way: str) -> None:
    reference = rpc.remote("worker1", Slow)
    line = sys._getframe().f_lineno - 1
    stop = getattr(reference, way)(timeout=0.05).stop_for
    with pytest.raises(CallTimeout) as caught:
        stop(0.3) if way == "rpc_sync" else stop(0.3).wait()
    message = str(caught.value)
    assert f"stop_for() of the RRef made by Slow at {__file__}:{line} on worker" in message
    assert "torchweft.rpc" not in message
    assert "b'" not in message
    reference.rpc_sync().stop_for(0.0)


def test_a_late_to_here_names_what_makes_the_value(group: Cluster) -> None:
    reference: Any = rpc.remote("worker1", stop_for, args=(0.3,))
    line = sys._getframe().f_lineno - 1
    with pytest.raises(CallTimeout) as caught:
        reference.to_here(timeout=0.05)
    message = str(caught.value)
    assert f"to_here() of the RRef made by stop_for at {__file__}:{line}" in message
    assert "torchweft" not in message
    reference.to_here()


def test_the_error_of_a_method_has_the_frames_of_the_method(group: Cluster) -> None:
    reference = rpc.remote("worker1", Accumulator, args=("not a number",))
    text = printed(lambda: reference.rpc_sync().add(1.0))
    assert text.count("TypeError") == 1
    assert "functions.py" in text
    assert not {file for file in files_in(text) if "/torchweft/" in file}


# Arguments of wrong types

WRONG: list[tuple[str, Callable[[Any], object], list[Any]]] = [
    ("timeout", lambda it: rpc.rpc_sync("worker1", divide, (1,), timeout=it), ["5", None, [1]]),
    ("timeout", lambda it: rpc.rpc_async("worker1", divide, (1,), timeout=it), ["5", None]),
    ("timeout", lambda it: rpc.remote("worker1", divide, (1,), timeout=it), ["5", None]),
    ("timeout", lambda it: rpc.RRef(1).to_here(it), ["5", None]),
    ("timeout", lambda it: rpc.RRef(1).rpc_sync(it).bit_length(), ["5", None]),
    ("timeout", lambda it: rpc.barrier(timeout=it), ["5", None]),
    ("timeout", lambda it: rpc.shutdown(timeout=it), ["5", None]),
    ("args", lambda it: rpc.rpc_sync("worker1", divide, args=it), [1, "1", torch.ones(1)]),
    ("kwargs", lambda it: rpc.rpc_async("worker1", divide, kwargs=it), [1, ["by"]]),
    ("func", lambda it: rpc.remote("worker1", it), ["divide", 1.0]),
    ("to", lambda it: rpc.rpc_sync(it, divide, (1,)), [3.5, None, b"worker1", ["worker1"]]),
    ("remote_device", lambda it: RemoteModule(it, torch.nn.Identity), [5]),
    ("module_cls", lambda it: RemoteModule("worker1", it), ["Linear", torch.nn.Linear(1, 1)]),
    ("args", lambda it: RemoteModule("worker1", torch.nn.Linear, args=it), [2, "2"]),
    ("kwargs", lambda it: RemoteModule("worker1", torch.nn.Linear, kwargs=it), [2, [2]]),
    ("optimizer_class", lambda it: DistributedOptimizer(it, [rpc.RRef(1)]), ["SGD", 1]),
    ("params_rref", lambda it: DistributedOptimizer(torch.optim.SGD, it), [None, rpc.RRef, "p"]),
    ("context_id", lambda it: autograd.backward(it, [torch.ones(())]), ["1", 1.5, [1], None]),
    ("context_id", lambda it: autograd.get_gradients(it), ["1", None]),
]


@pytest.mark.parametrize(
    ("name", "call", "value"), [(name, call, value) for name, call, all_ in WRONG for value in all_]
)
def test_a_wrong_type_is_a_type_error_that_names_the_argument(
    group: Cluster, name: str, call: Callable[[Any], object], value: Any
) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        call(value)
    message = str(caught.value)
    assert f"{name} is " in message
    assert ("None" if value is None else type(value).__name__) in message
    assert "pass " in message
    assert isinstance(caught.value, (TypeError, ValueError, RuntimeError))


@pytest.mark.parametrize("timeout", [-5, -0.5, float("nan"), float("-inf")])
def test_a_time_limit_is_not_negative(group: Cluster, timeout: float) -> None:
    for call in (
        lambda: rpc.rpc_sync("worker1", divide, (1,), timeout=timeout),
        lambda: rpc.rpc_async("worker1", divide, (1,), timeout=timeout),
        lambda: rpc.remote("worker1", divide, (1,), timeout=timeout),
        lambda: rpc.RRef(1).to_here(timeout),
        lambda: rpc.barrier(timeout=timeout),
    ):
        with pytest.raises(ConfigurationError, match=r"timeout is .*; pass a number of seconds"):
            call()


# Missing names


@pytest.mark.parametrize("owner", ["worker1", "driver"])
def test_a_missing_method_is_told_with_the_nearest_name(group: Cluster, owner: str) -> None:
    reference: Any = rpc.remote(owner, make_slow)  # A function: the caller knows no type.
    text = printed(lambda: reference.rpc_sync().stop_fro(1))
    message = "'Slow' object has no attribute 'stop_fro'; did you mean 'stop_for'?"
    assert f"UnknownFunction: {message}" in text
    assert not {file for file in files_in(text) if "/torchweft/" in file}
    with pytest.raises(AttributeError) as caught:
        reference.rpc_async().entirely_else().wait()
    assert "did you mean" not in str(caught.value)


def test_a_method_that_the_type_lacks_is_told_without_own_frames(group: Cluster) -> None:
    reference: Any = rpc.remote("worker1", Slow)
    text = printed(lambda: reference.rpc_sync().stop_fro(1))
    assert "did you mean 'stop_for'?" in text
    assert not {file for file in files_in(text) if "/torchweft/" in file}
