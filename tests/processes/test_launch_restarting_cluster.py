"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import time

import pytest

from tests.contract.processes.test_launch_restarting_cluster import PROMPT_S, kill
from torchweft import knobs
from torchweft.errors import (
    RendezvousTimeout,
)
from torchweft.launch import Nursery, cluster

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("quick_restarts")]


def test_closing_does_not_wait_for_a_restart(
    nursery: Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        knobs.RESTART_BACKOFF_S.override(1000.0),
        knobs.RESTART_BACKOFF_LIMIT_S.override(1000.0),
        cluster(workers=2, nursery=nursery, restarts=1) as group,
    ):
        kill(group, "worker1")
        with (
            knobs.WAIT_NOTICE_S.override(0.05),
            pytest.raises(RendezvousTimeout, match=r"'worker1' did not join within 0\.1 s"),
        ):
            group.wait_for("worker1", 0.1)
        start_s = time.monotonic()
    assert time.monotonic() - start_s < PROMPT_S
    assert "the cluster has waited 0 s for worker 'worker1' to join" in caplog.messages
