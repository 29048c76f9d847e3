"""Snapshots of a hybrid model: the rows of servers, and the state that each trainer has."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from torchweft import checkpoint
from torchweft.checkpoint import Snapshot
from torchweft.embedding import Tables
from torchweft.embedding.recovery import Tree
from torchweft.hybrid.optimizer import HybridOptimizer
from torchweft.rpc import get_worker_info


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
