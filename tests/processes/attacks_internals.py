"""Functions that read internals; ``attacks.py`` in the contract has the others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.contract.processes.attacks import LIMIT_S
from tests.free_encoder import pack_freely
from torchweft.engine.codec.objects import Packed, _pickled
from torchweft.engine.worker.current import current
from torchweft.rpc import calls, codec
from torchweft.rpc.worker import current_worker


def call_named(to: str, name: bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function of another worker by an arbitrary name."""
    worker = current_worker()
    return calls.call_and_wait(worker, current().find(to), name, args, kwargs, LIMIT_S)


def send_pickle(to: str, value: Any) -> Any:
    """Sends a pickle to a worker that has announced that it reads no pickles."""
    return _send(to, value, functools.partial(_pickled, main_by_name=False))


def send_freely(to: str, value: Any) -> Any:
    """Sends a worker plain values that no honest worker makes."""
    return _send(to, value, pack_freely)


def _send(to: str, value: Any, packer: Callable[[Any], Packed]) -> Any:
    worker, peer = current_worker(), current().find(to)
    before = peer.pack, codec.encode, codec.encode_whole
    peer.pack = packer
    codec.encode = codec.encode_whole = lambda *_: None  # Leaves all values to the packer.
    try:
        return calls.call_and_wait(worker, peer, IDENTITY, (), {"value": value}, LIMIT_S)
    finally:
        peer.pack, codec.encode, codec.encode_whole = before


IDENTITY = b"tests.contract.processes.functions:identity"
