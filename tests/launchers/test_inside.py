"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from pathlib import Path

from tests.contract.launchers.commands import (
    HELLO,
    greetings,
    joined,
)
from tests.contract.launchers.test_inside import together, unused_port
from tests.kubernetes_pods import fields_of, pod_of, variables_of
from torchweft.launch.kubernetes_manifest import Pods, job_set
from torchweft.secret import write_new


def test_pods_of_a_job_set(tmp_path: Path) -> None:
    write_new(tmp_path / "secret")
    here = {"WEFT_SECRET_FILE": str(tmp_path / "secret"), "HOME": str(tmp_path)}
    names = ["worker0", "worker1"]
    pods = Pods(image="r/train:1", command=["python", HELLO], name="demo", names=names)
    port = unused_port()
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    job = pod_of(job_set(pods))
    out, said = together([variables_of(job, fields_of(rank)) | here | meeting for rank in (0, 1)])
    assert joined(out) == greetings(2), said
    assert f"JobSet: rank 1 of 2, meeting at 127.0.0.1:{port} (RANK, WORLD_SIZE" in said
