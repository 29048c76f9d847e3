"""Where workers serve their metrics for Prometheus: an address, and a first port.

Each worker of a host has a port of its own: the first one, and its local rank.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import socket
from collections.abc import Iterable
from typing import NamedTuple

from torchweft.errors import ConfigurationError

VARIABLE = "WEFT_METRICS"
_PACKAGE = "prometheus_client"
_LOOPBACK = "127.0.0.1"
_MOST_PORTS = 1 << 16


class Address(NamedTuple):
    """An address and a port.

    Attributes:
        host: The address or the name of the interface at which a worker listens.
        port: The port.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host reach it."""
        return self.host == "localhost" or (self._ip is not None and self._ip.is_loopback)

    @property
    def is_unspecified(self) -> bool:
        """Whether it stands for all addresses of the host."""
        return self._ip is not None and self._ip.is_unspecified

    @property
    def _ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def url(self) -> str:
        """Where Prometheus finds the metrics."""
        return f"http://{self}/metrics"

    def plus(self, ports: int) -> Address:
        """Returns the address so many ports further.

        Raises:
            ConfigurationError: There is no such port.
        """
        if not 0 < self.port + ports < _MOST_PORTS:
            raise ConfigurationError(
                f"metrics at {self} need port {self.port + ports} as well: each worker of a host "
                f"has one of its own; ports end at {_MOST_PORTS - 1}, so begin with a smaller one"
            )
        return self._replace(port=self.port + ports)


def address_in(text: str, said_by: str) -> Address:
    """Returns the address that ``[HOST:]PORT`` means; without a host, that of loopback.

    Args:
        text: The text.
        said_by: The option or variable that it was given by.

    Raises:
        ConfigurationError: It means none.
    """
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    if (
        not (port.isascii() and port.isdigit() and 0 < int(port) < _MOST_PORTS)
        or bool(colon) != bool(host)
        or (":" in host and not is_bracketed)
    ):
        raise ConfigurationError(
            f"{said_by} is {text!r}; write a port from 1 to {_MOST_PORTS - 1}, as 9400, or an "
            "address and a port, as 0.0.0.0:9400 or [::1]:9400"
        )
    return Address(host or _LOOPBACK, int(port))


def check_package() -> None:
    """Raises ConfigurationError if this interpreter has no package that serves metrics."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise missing(_PACKAGE)


def missing(package: str | None) -> ConfigurationError:
    """Returns the error for a package that is not installed."""
    return ConfigurationError(
        f"metrics cannot be served without the package {package!r}: "
        "pip install 'torchweft[metrics]'"
    )


def taken(address: Address, error: OSError, fix: str = "take another port") -> ConfigurationError:
    """Returns the error for an address at which a worker cannot listen."""
    return ConfigurationError(
        f"metrics cannot be served at {address.host}, port {address.port}: {error}; {fix}"
    )


def check_free(addresses: Iterable[Address]) -> None:
    """Checks that workers of this host can listen at all addresses.

    Raises:
        ConfigurationError: An address cannot be listened at; says which, and why.
    """
    with contextlib.ExitStack() as opened:
        for address in addresses:
            try:
                opened.enter_context(listener(address))
            except OSError as error:
                raise taken(address, error) from error


def listener(address: Address) -> socket.socket:
    """Returns a socket that is bound to an address, and listens; raises OSError if it cannot."""
    host, port = address
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening
