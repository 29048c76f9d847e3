"""The requests of references to the workers that own their values."""

from __future__ import annotations

from typing import Any

import torch

import torchweft.rpc
from torchweft.compat.rpc.constants import UNSET_RPC_TIMEOUT
from torchweft.ids import ReferenceId
from torchweft.rpc.completion import WhenReady
from torchweft.rpc.functions import async_execution
from torchweft.rpc.worker import current_worker
from torchweft.serialize.registry import remotely_callable_unless_strict


@remotely_callable_unless_strict
@async_execution
def when_made(reference: tuple[int, int, int]) -> torch.futures.Future[None]:
    """Returns a future that is done when a value of this worker has been made, or cannot be."""
    made: torch.futures.Future[None] = torch.futures.Future()
    owned = current_worker().references.value_of(ReferenceId(*reference), is_use=False)
    owned.when_ready(lambda _: made.set_result(None))
    return made


@remotely_callable_unless_strict
def _rref_typeof_on_owner(reference: torchweft.rpc.RRef[Any]) -> Any:
    """Returns the type of a value of this worker, when the value has been made."""
    owned = current_worker().references.value_of(reference.id)
    return WhenReady(owned, lambda value: (_rref_typeof_on_owner, type(value)), reference)


def ask_type(
    reference: torchweft.rpc.RRef[Any], timeout: float = UNSET_RPC_TIMEOUT
) -> torch.futures.Future[Any]:
    """Asks the owner of a value for its type."""
    return torchweft.rpc.rpc_async(
        reference.owner(), _rref_typeof_on_owner, (reference,), None, timeout
    )
