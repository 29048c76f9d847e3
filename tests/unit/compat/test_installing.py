"""Tests in this process; ``tests/contract/end_to_end/test_compat_install.py`` starts processes."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed
import torch.nn.parallel.distributed

import torchweft.compat
from tests.thorough import CHECKED, spread
from torchweft.compat.installing import MODULES
from torchweft.engine.worker import current
from torchweft.errors import AlreadyInitialized

RPC = "torch.distributed.rpc"
HOLDERS = ("torch._C", "torch.distributed", "torch.nn.parallel", "torch.futures")


@pytest.fixture(autouse=True)
def _put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", "/some/folder")
    with warnings.catch_warnings():
        # Modules of other tests may hold PyTorch's names.
        warnings.filterwarnings("ignore", "torchweft.compat.install")
        yield
        monkeypatch.undo()  # first: a patch may keep Weft installed
        torchweft.compat.uninstall()


def take_state() -> dict[str, Any]:
    """Returns the state that installing may change, by identity."""
    holders = [name for name in sys.modules if name.startswith(HOLDERS)]
    return {
        "modules": {n: id(m) for n, m in sys.modules.items() if not n.startswith("torchweft.")},
        "attributes": {
            (holder, name): id(value)
            for holder in ["torch", *holders]
            if isinstance(sys.modules[holder], ModuleType)
            for name, value in vars(sys.modules[holder]).items()
            if name != "__warningregistry__"
        },
        "finders": [id(finder) for finder in sys.meta_path],
        "environment": dict(os.environ),
        "path": list(sys.path),
        "filters": list(warnings.filters),
    }


@pytest.mark.parametrize(
    ("sequence", "in_children"),
    spread(["iu", "iiu", "iuu", "iuiu", "u", "iiuiuu"], [True, False], all_from=CHECKED),
)
def test_everything_is_put_back(sequence: str, in_children: bool) -> None:
    for module in [*MODULES.values(), "torchweft.engine.worker"]:
        importlib.import_module(module)
    before = take_state()
    for step in sequence:
        if step == "i":
            torchweft.compat.install(in_children=in_children)
            assert take_state() != before
        else:
            torchweft.compat.uninstall()
        assert torchweft.compat.is_installed() == (step == "i")
    assert take_state() == before


def test_what_is_imported_is_weft() -> None:
    torchweft.compat.install()
    for name in [n for n in MODULES if n in sys.modules]:
        ours = sys.modules[MODULES[name]]
        assert importlib.import_module(name) is ours
        assert ours.__name__ == ours.__spec__.name == MODULES[name]  # type: ignore[union-attr]
    rpc, autograd = torch.distributed.rpc, torch.distributed.autograd  # noqa: TID251

    assert (rpc.__name__, autograd.__name__) == (
        "torchweft.compat.rpc",
        "torchweft.compat.autograd",
    )
    assert torch.nn.parallel.distributed.RRef is rpc.RRef


def test_a_worker_of_pytorchs_rpc_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[RPC], "_is_current_rpc_agent_set", lambda: True)
    before = take_state()
    with pytest.raises(AlreadyInitialized, match=r"after shutdown\(\)"):
        torchweft.compat.install()
    assert not torchweft.compat.is_installed()
    assert take_state() == before


def test_a_worker_of_weft_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    torchweft.compat.install()
    monkeypatch.setattr(current, "here", SimpleNamespace(info=SimpleNamespace(name="ps")))
    with pytest.raises(AlreadyInitialized, match=r"worker 'ps': call rpc\.shutdown\(\) first"):
        torchweft.compat.uninstall()
    assert torchweft.compat.is_installed()


def test_modules_that_were_too_early_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ModuleType("program")
    stock = sys.modules[RPC]
    vars(program).update(rpc=stock, rpc_sync=stock.rpc_sync, DDP=torch.nn.Module)
    monkeypatch.setitem(sys.modules, "program", program)
    with pytest.warns(RuntimeWarning, match=r"program \(rpc, rpc_sync\)") as caught:
        torchweft.compat.install()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torchweft.compat.install()  # warns only once
