"""Finds the network interface on the way to another host, and its speed."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torchweft.transport.addresses import TcpAddress, is_far, own_address_towards, parse

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16
_ADDRESS_AT = slice(20, 24)
_MEGABIT = 125_000
"""Bytes per second."""


class NetworkLink(NamedTuple):
    """A network interface.

    Attributes:
        interface: Its name; empty if it is unknown.
        bytes_per_s: Its speed; 0 if it does not tell, as most virtual ones.
    """

    interface: str = ""
    bytes_per_s: float = 0.0


UNKNOWN = NetworkLink()


def link_towards(addresses: Iterable[str], sys: Path = Path("/sys")) -> NetworkLink:
    """Returns the interface on the route to the first of a worker's addresses in a network."""
    for place in map(parse, addresses):
        if isinstance(place, TcpAddress) and is_far(place):
            interface = _interface_of(own_address_towards(place.host))
            return NetworkLink(interface, _speed(sys, interface)) if interface else UNKNOWN
    return UNKNOWN


def _interface_of(address: str) -> str:
    """Returns the name of the interface that has an address of this host."""
    try:
        own = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if own.version == 6:
        return _interface_of_six(own.packed.hex())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s24x", name.encode()[: _NAME_BYTES - 1])
            try:
                found = fcntl.ioctl(asking, _SIOCGIFADDR, request)
            except OSError:  # It has no address.
                continue
            if found[_ADDRESS_AT] == own.packed:
                return name
    return ""


def _interface_of_six(address: str) -> str:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    found = (line.split() for line in lines)
    return next((fields[-1] for fields in found if fields[0] == address), "")


def _speed(sys: Path, interface: str) -> float:
    try:
        megabits = int((sys / "class/net" / interface / "speed").read_text())
    except (OSError, ValueError):
        return 0.0
    return max(megabits, 0) * _MEGABIT
