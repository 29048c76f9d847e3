"""A Ray of this test: nodes on this machine, in a process of their own that is told what to do.

Run as a program, it prints the address and obeys a line each: ``remove`` kills the last node,
``add`` adds one, ``groups`` prints the states of all placement groups.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.contract.launchers.commands import environment

NODES, CPUS = 3, 2
SMALL = {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
}
NODE = {
    "num_cpus": CPUS,
    "num_gpus": 1,  # Ray does not look whether there is one.
    "resources": {"special": 1},
    "labels": {"zone": "a"},
    "object_store_memory": 80_000_000,
}


class RayCluster:
    """A running cluster.

    Attributes:
        address: Its address.
        directory: Where it writes its logs.
    """

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self._process = process
        self.directory = directory
        self.address = self._answer()

    def tell(self, request: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("cluster: "):
                return line.removeprefix("cluster: ").strip()
        raise AssertionError("the process of the Ray cluster has ended")


@contextmanager
def running(directory: Path) -> Iterator[RayCluster]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'torchweft[ray]'")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.contract.launchers.ray_cluster"],
        cwd=Path(__file__).parents[3],
        env=environment({**SMALL, "RAY_TMPDIR": str(directory)}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield RayCluster(process, directory)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster
    from ray.util import placement_group_table

    def add(**more: object) -> object:
        return cluster.add_node(**NODE, **more)

    cluster = Cluster()
    nodes = [add(include_dashboard=False)]
    nodes += [add() for _ in range(NODES - 1)]
    ray.init(cluster.address, log_to_driver=False)
    print("cluster:", cluster.address, flush=True)
    try:
        for line in sys.stdin:
            answer = ""
            if line.strip() == "add":
                nodes.append(add())
            elif line.strip() == "remove":
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            else:
                answer = " ".join(each["state"] for each in placement_group_table().values())
            print("cluster:", answer, flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)
    main()
