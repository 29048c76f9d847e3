"""Clients come to a server of an open group and go by every way out: nothing of them stays.

``python -m benchmarks.endurance.departures`` does the same with 2,000 clients, and looks at memory
and times, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.endurance import departures
from benchmarks.endurance.clients import WAYS
from benchmarks.endurance.samples import Course
from tests.open_workers import OpenWorkers
from torchweft.engine.protocol import registration
from torchweft.engine.threads import reactor
from torchweft.engine.worker import agent

CLIENTS = 3 * len(WAYS)
SAMPLES = 6
ENDED, UNUSED, SENDERS = 8, 2, 8
"""How many workers that are gone, were never called, or sent calls the server remembers in full;
otherwise 256, 16 and 256."""
MOST = {
    "threads": 0,
    "descriptors": 0,
    "tensors": 0,
    "objects of Weft": 250,  # A client that is kept, or is noticed late, has 15 to 30.
    "file of the store": 10,  # A client that has a key for ever has 400. Ids get more digits.
}
"""What may rise once there were more clients than are remembered."""


def serve(path: str) -> tuple[dict[str, Course], int]:
    """Returns what a server holds in the course of its clients, and its peers in the end."""
    registration.ENDED_LIMIT, agent._MOST_UNUSED = ENDED, UNUSED
    reactor.SWEEP_LIMIT = SENDERS
    courses, _, types = departures.measure(path, CLIENTS, SAMPLES)
    return courses, types[-1]["torchweft.engine.worker.peers.Peer"]


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_server_keeps_nothing_of_clients_that_are_gone(warm: OpenWorkers, tmp_path: Path) -> None:
    courses, peers = warm.do("server", serve, f"{tmp_path}/store")
    # Those that are lost, and those that have no name any more.
    assert peers <= 2 * ENDED + UNUSED + departures.AT_ONCE + 3
    for kind, most in MOST.items():
        course = courses[kind]
        is_flat = course.growth <= most or max(course.values) <= course.kind.bound
        assert is_flat, f"{kind}: {course.values}"
