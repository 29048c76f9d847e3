"""Snapshots of a hybrid model: the rows of servers, and the state that each trainer has."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from torchweft import checkpoint
from torchweft.checkpoint import Snapshot, kinds
from torchweft.embedding import Tables
from torchweft.hybrid.optimizer import HybridOptimizer
from torchweft.rpc import get_worker_info

Tree = dict[str, Any]


def tree(
    module: nn.Module, optimizer: HybridOptimizer | None, state: dict[str, Any] | None
) -> Tree:
    """Returns all state that each trainer has."""
    return {
        "model": module,
        **({} if optimizer is None else {"optimizer": optimizer}),
        "program": {} if state is None else state,
    }


def save(
    tables: Tables | None,
    directory: str | os.PathLike[str],
    whole: Tree,
    step: int,
    keep: int | None,
    since: Snapshot | int | None,
) -> Snapshot:
    """Saves the rows on servers, and the state of this trainer, in one snapshot."""
    if tables is not None:
        return tables.save(directory, step=step, state=whole, keep=keep, since=since)
    me = [get_worker_info().name]
    return checkpoint.save(directory, {"program": whole}, step=step, keep=keep, random_states=me)


def restore(
    tables: Tables | None, directory: str | os.PathLike[str], whole: Tree, step: int | None
) -> Snapshot:
    """Restores the rows on servers, and the state of this trainer."""
    if tables is not None:
        return tables.restore(directory, state=whole, step=step)
    return checkpoint.restore(directory, {"program": whole}, step=step)


def taken(state: Tree, path: str = "state") -> Tree:
    """Returns copies of the state of all entries, for another trainer."""
    return {
        key: taken(value, f"{path}.{key}")
        if _is_branch(value)
        else kinds.take(
            f"{path}.{key}", kinds.kind_of(f"{path}.{key}", value, is_remote=False), value
        )
        for key, value in state.items()
    }


def put(state: Tree, values: Tree) -> None:
    """Puts the state of another trainer into all entries."""
    for key, value in state.items():
        kind = "" if _is_branch(value) else kinds.kind_of(key, value, is_remote=False)
        if not kind:
            put(value, values[key])
        elif kind == kinds.VALUE and not isinstance(value, (dict, list)):
            state[key] = values[key]
        else:
            kinds.put(kind, value, values[key], strict=True)


def _is_branch(value: Any) -> bool:
    """Whether a value is a dict with entries of its own, rather than a plain one."""
    return isinstance(value, dict) and not kinds.is_plain(value)
