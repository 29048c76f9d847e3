"""Workers that serve their metrics from their start, as a launcher has told them."""

from __future__ import annotations

import secrets
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra 'metrics'")

from tests.contract.processes.weft_run import LIMIT_S, Start, finish, running
from torchweft import cluster, rpc
from torchweft.errors import ConfigurationError
from torchweft.launch import Nursery
from torchweft.scraping import Address, check_free

SCRIPT = """
import urllib.request
from torchweft import rpc
rpc.init_rpc()
rpc.barrier()
if os.environ["RANK"] == "0":
    for url in sys.argv[1:]:
        text = urllib.request.urlopen(url, timeout=20).read().decode()
        print(*[line for line in text.splitlines() if line.startswith("weft_worker_up{")])
rpc.shutdown()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from running(tmp_path)


def free_ports(count: int) -> Address:
    """Returns the first of ports that follow one another and are free.

    They are below those that Linux gives to connections, which come and go.
    """
    for _ in range(100):
        first = Address("127.0.0.1", secrets.choice(range(15_000, 32_000)))
        try:
            check_free([first.plus(number) for number in range(count)])
        except ConfigurationError:
            continue
        return first
    raise AssertionError("there are no free ports")


def scraped(address: Address) -> str:
    with urllib.request.urlopen(address.url, timeout=LIMIT_S) as answer:
        text: str = answer.read().decode()
    return text


def test_each_worker_of_a_run_serves_at_a_port_of_its_own(start: Start) -> None:
    first = free_ports(2)
    urls = [first.url, first.plus(1).url]
    process = start(SCRIPT, "--warm", "--metrics", str(first.port), count=2, arguments=urls)
    status, out, err = finish(process)
    assert status == 0, err
    for name, line in zip(("worker0", "worker1"), out, strict=True):
        assert f'weft_worker="{name}"' in line
        assert line.endswith("} 1.0")
    announced = [line for line in err if line.startswith("torchweft run: metrics")]
    assert announced == [f"torchweft run: metrics: worker0 {urls[0]}, worker1 {urls[1]}"]


def test_no_worker_starts_if_a_port_is_taken(start: Start, tmp_path: Path) -> None:
    first = free_ports(2)
    with socket.socket() as other:
        other.bind(first.plus(1))
        other.listen()
        body = f"open({str(tmp_path / 'started')!r}, 'w')"
        status, out, err = finish(start(body, "--metrics", str(first.port), count=2))
    assert (status, out) == (2, [])
    assert f"metrics cannot be served at 127.0.0.1, port {first.port + 1}: " in err[-1]
    assert not (tmp_path / "started").exists()


def test_a_worker_does_not_join_if_its_port_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = free_ports(1).port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        monkeypatch.setenv("WEFT_METRICS", str(port - 3))
        monkeypatch.setenv("LOCAL_RANK", "3")
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path / 'store'}")
        with pytest.raises(ConfigurationError, match=f"port {port}: "):
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    served = Address("127.0.0.1", port)
    assert 'weft_worker="alone"' in scraped(served)
    rpc.shutdown()
    check_free([served])


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_caller_of_a_cluster_and_its_workers_serve(nursery: Nursery, restarts: int) -> None:
    first = free_ports(3)
    names = ["driver", "worker0", "worker1"]
    with cluster(workers=2, nursery=nursery, metrics=first.port, restarts=restarts):
        for number, name in enumerate(names):
            assert f'weft_worker="{name}"' in scraped(first.plus(number))
    check_free([first.plus(number) for number in range(3)])
