"""Makes this process the only worker of a group: its maps run on its own threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributed import HashStore

from torchweft import rpc


@contextlib.contextmanager
def joined(**options: object) -> Iterator[None]:
    """Makes this process ``worker0`` within a ``with`` block."""
    made = rpc.RpcBackendOptions(store=HashStore(), **options)  # type: ignore[arg-type]
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=made)
    try:
        yield
    finally:
        rpc.shutdown(graceful=False)
