"""``torchweft.cluster`` needs no secret, and is not disturbed by that of another group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchweft import rpc, secret
from torchweft.engine.worker.current import current
from torchweft.launch import Nursery, cluster
from torchweft.secret import Secret


@pytest.mark.keeps("processes")
@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_cluster_where_a_secret_is_set(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool, restarts: int
) -> None:
    path = tmp_path / "secret"
    secret.write_new(path)
    options = None
    if is_told:
        options = rpc.RpcBackendOptions(secret=Secret.from_file(path), listen="192.0.2.1")
    else:
        monkeypatch.setenv("WEFT_SECRET_FILE", str(path))
        monkeypatch.setenv("WEFT_LISTEN", "192.0.2.1")
    with cluster(1, nursery=nursery, rpc_backend_options=options, restarts=restarts):
        assert rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), 1)).item() == 2.0
        listeners = [*current().me.registration.addresses]
        listeners += current().find("worker0").registration.addresses
        assert all(each.startswith(("unix:@", "tcp:127.0.0.1:")) for each in listeners)
