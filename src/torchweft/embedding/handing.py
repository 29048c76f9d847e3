"""Hands state that one trainer has restored on to another one."""

from __future__ import annotations

from typing import Any

from torchweft.checkpoint import kinds

Tree = dict[str, Any]
"""Entries of a snapshot by name; see ``torchweft.checkpoint.save``."""


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
