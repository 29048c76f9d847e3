"""Chooses the twin of the hot path: the one in C where it can run, otherwise the one in Python.

Both do the same and make the same bytes, so workers with different twins talk to each other. The
one in C, ``torchweft._native``, is built with the package where there is a C compiler. It takes a
few times less time; the one in Python is written to be read.

==========================  ======================================================================
part of the module in C     does as
==========================  ======================================================================
``Link``, ``Lease``         a connection of ``io.link``; the right to read it, see ``worker.calls``
``Lease.ask``               sends a call, and looks for its answer for a moment; ``worker.calls``
``Link.read``               reads, and serves usual calls that come alone; ``worker.receiving``
``serve_call``              ``_serve`` of ``rpc.serving``; False for a call that is not usual
``set_dtype``               takes a dtype of ``codec.tensors``; called once for each
``set_value_parts``         takes what ``codec.values`` needs of Python; called once
``encode_tensors``          ``tensors.encode_tensors``; None for tensors that it leaves
``decode_tensors``          ``tensors.decode_tensors``; None for tensors that it leaves
``encode_values``           ``values.encode``; False where that returns None
``decode_values``           ``values.decode`` without a limit; NotImplemented for malformed bytes
``encode_call``             ``codec.objects.plain_frame``; None also for what is too large
``decode_answer``           ``Decoder.result_of``; NotImplemented for an answer that it leaves
``encode_result``           ``Worker.reply`` of ``rpc.worker``: the frame of the answer; False for a
                            result that needs a pickle, None for others that it leaves
==========================  ======================================================================
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from torchweft import knobs
from torchweft.errors import ConfigurationError
from torchweft.free_threading import IS_FREE_THREADED


def _find() -> tuple[Any, str]:
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


def _load() -> tuple[Any, str]:
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
