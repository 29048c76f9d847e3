"""The names of ``torch.distributed.autograd``, meaning Weft."""

from __future__ import annotations

from typing import Any

from weft.autograd import backward, context, get_gradients

__all__ = ["backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Whether distributed autograd can be used here: always."""
    return True


def _init(worker_id: int) -> None:
    pass


def _get_debug_info() -> dict[str, str]:
    return {}


def _retrieve_context(context_id: int) -> Any:
    raise NotImplementedError


def _current_context() -> Any:
    raise NotImplementedError


def _new_context() -> Any:
    raise NotImplementedError


def _release_context(context_id: int) -> None:
    raise NotImplementedError


def _get_max_id() -> int:
    raise NotImplementedError


def _is_valid_context(context_id: int) -> bool:
    raise NotImplementedError


class DistAutogradContext:
    pass
