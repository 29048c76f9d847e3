"""The random number generators of a worker: of Python, NumPy and PyTorch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def take() -> dict[str, Any]:
    """Returns the states of this process's generators."""
    numpy_state: Any = np.random.get_state(legacy=False)
    states = {
        "python": random.getstate(),
        "numpy": _with_key(numpy_state, numpy_state["state"]["key"].tolist()),
        "torch": torch.get_rng_state(),
    }
    # If CUDA is not initialized, asking would make the process use a device that it does not use.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [state.cpu() for state in torch.cuda.get_rng_state_all()]
    return states


def put(states: dict[str, Any]) -> None:
    """Sets the generators of this process to saved states."""
    random.setstate(states["python"])
    key = np.asarray(states["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(_with_key(states["numpy"], key))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)


def _with_key(numpy_state: dict[str, Any], key: Any) -> dict[str, Any]:
    return {**numpy_state, "state": {**numpy_state["state"], "key": key}}
