"""Each worker of a host has a port of its own, and its launcher says where."""

from __future__ import annotations

import pytest

from torchweft.errors import ConfigurationError
from torchweft.launch.terms import Terms
from torchweft.launch.worker import Scrapes
from torchweft.scraping import Address, address_in

TWO_HOSTS = {"a": 0, "b": 1, "c": 0, "d": 1}
AT = {name: ("one", "10.0.0.1") if name in "ab" else ("two", "10.0.0.2") for name in TWO_HOSTS}


def served_at(scrapes: Scrapes) -> list[int]:
    """The port of each worker: its variable, and its local rank."""
    return [
        address_in(scrapes.variables(name)["WEFT_METRICS"], "").port + local_rank
        for name, local_rank in scrapes.local_ranks.items()
    ]


@pytest.mark.parametrize(
    ("by_rank", "shift", "ports"),
    [(False, 0, [9, 10, 9, 10]), (True, 0, [9, 10, 11, 12]), (True, 1, [10, 11, 12, 13])],
)
def test_ports_of_one_machine_differ(by_rank: bool, shift: int, ports: list[int]) -> None:
    scrapes = Scrapes(Address("127.0.0.1", 9), TWO_HOSTS, shift, by_rank)
    assert [scrapes.of(name).port for name in TWO_HOSTS] == ports
    assert served_at(scrapes) == ports


def test_a_worker_without_a_port_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="need port 65536"):
        Scrapes(Address("127.0.0.1", 65535), TWO_HOSTS)


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("127.0.0.1", "c http://127.0.0.1:9/metrics on two"),
        ("0.0.0.0", "c http://10.0.0.2:9/metrics"),
        ("10.0.0.9", "c http://10.0.0.9:9/metrics"),
    ],
)
def test_the_text_says_where_to_scrape(host: str, text: str) -> None:
    assert f", {text}, d " in Scrapes(Address(host, 9), TWO_HOSTS).text(AT)


def test_the_text_of_many_workers_is_one_line() -> None:
    many = {f"w{rank}": rank for rank in range(100)}
    text = Scrapes(Address("127.0.0.1", 9400), many).text()
    assert text.startswith("metrics: w0 http://127.0.0.1:9400/metrics, w1 http://127.0.0.1:9401/")
    assert text.endswith("w7 http://127.0.0.1:9407/metrics, and 92 more at the ports that follow")


def test_the_caller_of_a_cluster_has_the_first_port(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Terms(["a", "b"]).scrapes() is None
    monkeypatch.setenv("WEFT_METRICS", "9400")
    for terms in (Terms(["a", "b"]), Terms(["a", "b"], metrics=9400)):
        scrapes = terms.scrapes()
        assert scrapes is not None
        assert [scrapes.of(name).port for name in "ab"] == [9401, 9402]
    with pytest.raises(ConfigurationError, match="metrics is 'x'"):
        Terms(["a"], metrics="x")
