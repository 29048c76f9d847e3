from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder

import pytest

from torchweft.compat.installing import MODULES, Redirect

STOCK = "torch.distributed.autograd"


@pytest.fixture
def redirect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Redirect]:
    """Installs a redirection, as in a process that never imported PyTorch's module."""
    import torch.distributed

    finder = Redirect()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.setattr(torch.distributed, "autograd", None)  # so that monkeypatch restores it
    monkeypatch.delitem(sys.modules, STOCK)
    yield finder
    sys.modules.pop(STOCK, None)


def test_what_is_imported_is_wefts_own_module(redirect: Redirect) -> None:
    ours = importlib.import_module(MODULES[STOCK])
    before = dict(vars(ours))
    theirs = importlib.import_module(STOCK)
    assert theirs is ours
    assert sys.modules[STOCK] is ours
    assert sys.modules["torch.distributed"].autograd is ours
    for name in ("__name__", "__spec__", "__loader__", "__package__"):
        assert getattr(ours, name) is before[name]
    assert ours.__name__ == ours.__spec__.name == MODULES[STOCK]  # type: ignore[union-attr]
    assert MODULES[STOCK].encode() in pickle.dumps(ours.backward)


def test_what_weft_has_not_is_not_found_under_pytorchs_name(redirect: Redirect) -> None:
    # The folder of the module that replaces the package contains a file of that name.
    folder = list(importlib.import_module("torchweft.compat.rpc").__path__)
    assert PathFinder.find_spec("torch.distributed.rpc.agents", folder) is not None
    with pytest.raises(ModuleNotFoundError, match=r"rpc\.agents'.* torchweft\.compat") as error:
        redirect.find_spec("torch.distributed.rpc.agents", folder)
    assert error.value.name == "torch.distributed.rpc.agents"


def test_nothing_else_is_found(redirect: Redirect) -> None:
    for name in ("torch.distributed", "torch.distributed.optim", "torch.distributed.rpcs", "json"):
        assert redirect.find_spec(name, None) is None
