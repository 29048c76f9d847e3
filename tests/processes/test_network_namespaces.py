"""Two workers that only a network connects: each is in a network namespace of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import namespace_program

PROGRAM = Path(namespace_program.__file__)
ROOT = PROGRAM.parents[2]
LIMIT_S = 100.0


class Site(NamedTuple):
    """A network namespace, and the address of this side of the cable between the two."""

    namespace: str
    interface: str
    address: str


def run_ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def sites() -> Iterator[list[Site]]:
    """Two network namespaces with a cable between them; skips where none can be made."""
    if shutil.which("ip") is None:
        pytest.skip("there is no command 'ip' to make network namespaces with")
    number = os.getpid()
    made = [
        Site(f"weft-{number}-{rank}", f"weft{number % 100_000}v{rank}", f"198.18.77.{rank + 1}")
        for rank in range(2)
    ]
    try:
        try:
            _connect(made)
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield made
    finally:
        for site in made:
            subprocess.run(["ip", "netns", "del", site.namespace], capture_output=True)


def _connect(sites: list[Site]) -> None:
    for site in sites:
        run_ip("netns", "add", site.namespace)
    first, second = sites
    run_ip("-n", first.namespace, "link", "add", first.interface, "type", "veth",
           "peer", "name", second.interface, "netns", second.namespace)  # fmt: skip
    for site in sites:
        run_ip("-n", site.namespace, "addr", "add", f"{site.address}/24", "dev", site.interface)
        for interface in (site.interface, "lo"):
            run_ip("-n", site.namespace, "link", "set", interface, "up")


def start(rank: int, site: Site, store: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        # Processes of one host and user may read each other's memory whatever their network.
        "WEFT_CMA_FROM_BYTES": str(1 << 60),
        "WEFT_STRIPED_FROM_BYTES": str(1 << 19),
    }
    command = ["ip", "netns", "exec", site.namespace, sys.executable, str(PROGRAM)]
    return subprocess.Popen(
        [*command, str(rank), str(store), site.address],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(2 * LIMIT_S)
def test_tensors_cross_a_network(sites: list[Site], tmp_path: Path) -> None:
    workers = [start(rank, site, tmp_path / "store") for rank, site in enumerate(sites)]
    try:
        outputs = [worker.communicate(timeout=LIMIT_S) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    found = json.loads(outputs[0][0])
    assert found["wrong"] == []
    assert found["family"] == "AF_INET"
    assert found["way"] == "STRIPED"
    assert found["data families"] == ["AF_INET"] * len(found["data families"])
    large = [size for size in namespace_program.SIZES if size >= 1 << 19]
    assert found["received"] == sum(large)
