"""Addresses at which workers serve their metrics."""

from __future__ import annotations

import socket

import pytest

from torchweft import scraping
from torchweft.errors import ConfigurationError
from torchweft.scraping import Address, address_in, check_free, check_package


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [
        ("9400", "127.0.0.1", 9400, "http://127.0.0.1:9400/metrics"),
        ("0.0.0.0:1", "0.0.0.0", 1, "http://0.0.0.0:1/metrics"),
        ("[::1]:65535", "::1", 65535, "http://[::1]:65535/metrics"),
        ("node7:9400", "node7", 9400, "http://node7:9400/metrics"),
    ],
)
def test_a_host_and_a_port_are_read_and_written(text: str, host: str, port: int, url: str) -> None:
    address = address_in(text, "--metrics")
    assert address == (host, port)
    assert address.url == url
    assert address_in(str(address), "--metrics") == address


@pytest.mark.parametrize("text", ["", "0", "65536", "-1", "a", ":9400", "::1:9400", "[]:1", "h:"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--metrics is .*; write a port from 1 to 65535"):
        address_in(text, "--metrics")


def test_ports_end_at_the_last_one() -> None:
    assert Address("h", 65534).plus(1).port == 65535
    with pytest.raises(ConfigurationError, match="need port 65536 as well"):
        Address("h", 65534).plus(2)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = Address("127.0.0.1", other.getsockname()[1])
        with pytest.raises(ConfigurationError, match=rf"127.0.0.1, port {taken.port}: .*in use"):
            check_free([taken])
    check_free([taken])
    check_free([taken])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "_PACKAGE", "no_such_package")
    with pytest.raises(ConfigurationError, match=r"pip install 'torchweft\[metrics\]'"):
        check_package()
