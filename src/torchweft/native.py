"""Chooses the twin of the hot path: the one in C where it can run, otherwise the one in Python.

Both do the same and make the same bytes, so workers with different twins talk to each other. The
one in C, ``torchweft._native``, is built with the package where there is a C compiler. It takes a
few times less time; the one in Python is written to be read.
"""

from __future__ import annotations

import importlib
import types

import torch

from torchweft import knobs
from torchweft.errors import ConfigurationError
from torchweft.free_threading import IS_FREE_THREADED


def _find() -> tuple[types.ModuleType | None, str]:
    """Returns the module in C, if it is to be used, and why this twin was chosen."""
    setting, variable = knobs.NATIVE.get(), knobs.NATIVE.variable
    if setting not in ("auto", "0", "1"):
        raise ConfigurationError(f"{variable}={setting} is none of auto, 0, 1")
    if setting == "0":
        return None, f"{variable}=0 turns the native twin off"
    module, reason = _load()
    if module is None and setting == "1":
        raise ConfigurationError(f"{variable}=1 demands the native twin, but {reason}")
    return module, reason


def _load() -> tuple[types.ModuleType | None, str]:
    if IS_FREE_THREADED:
        return None, "it relies on the interpreter lock, and this Python is free-threaded"
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return None, f"torch {torch.__version__} has no table of DLPack functions; 2.10 has"
    try:
        module = importlib.import_module("torchweft._native")
    except ImportError as error:
        return None, f"it was not built, as there was no C compiler at installation ({error})"
    return module, "it was built for this Python, and torch offers its tensors"


native, reason = _find()
"""The twin in C, or None; and why, as ``torchweft doctor`` tells it."""
