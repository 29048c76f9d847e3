"""Finds a fresh part of a store that outlives the workers, such as the one in torchrun's agent.

When torchrun starts its workers again, they meet at the same store, which has the keys of their
former lives. The number of restarts does not tell lives apart: each agent counts only the failures
of its own workers. So rank 0 begins a round with a new random name. The others answer in that
round, each with a random name of its own, and rank 0 confirms the answers. A worker may find the
round of a former life first. But rank 0 of that life is gone, so it never confirms the answer.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from typing import Any

_POLL_S = 0.02
_ROUND = "round"


def is_needed() -> bool:
    """Whether the store of ``env://`` is one that an agent of torchrun keeps."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def agree(store: Any, rank: int, world_size: int, timeout_s: float) -> str:
    """Returns the name of a round that all workers of this life are in.

    If not all workers come in time, the round is not confirmed; joining in it fails, and names the
    missing workers.

    Args:
        store: The store, whose every operation ends in time.
        rank: This worker's rank.
        world_size: Number of workers.
        timeout_s: How long to wait for the others, in seconds.
    """
    end_s = time.monotonic() + timeout_s
    own = secrets.token_hex(8)
    if rank == 0:
        return _lead(store, own, world_size, end_s)
    return _follow(store, own, rank, end_s)


def _lead(store: Any, name: str, world_size: int, end_s: float) -> str:
    store.set(_ROUND, name)
    answers = {str(rank): _answer_key(name, rank) for rank in range(1, world_size)}
    while answers and not store.check(list(answers.values())):
        if time.monotonic() > end_s:
            return name
        time.sleep(_POLL_S)
    confirmed = {rank: bytes(store.get(key)).decode() for rank, key in answers.items()}
    store.set(_confirmation_key(name), json.dumps(confirmed))
    return name


def _follow(store: Any, own: str, rank: int, end_s: float) -> str:
    answered = ""
    while time.monotonic() <= end_s:
        name = bytes(store.get(_ROUND)).decode() if store.check([_ROUND]) else ""
        if name and name != answered:
            store.set(_answer_key(name, rank), own)
            answered = name
        if name and store.check([_confirmation_key(name)]):
            confirmed = json.loads(bytes(store.get(_confirmation_key(name))))
            if confirmed.get(str(rank)) == own:
                return name
        time.sleep(_POLL_S)
    return answered or own


def _answer_key(name: str, rank: int) -> str:
    return f"{name}/answer/{rank}"


def _confirmation_key(name: str) -> str:
    return f"{name}/confirmed"
