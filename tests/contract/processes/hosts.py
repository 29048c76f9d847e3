"""Hosts as network namespaces: each has a cable to one switch, and cables fail in many ways.

All is done with ``ip`` (and ``tc``), so no firewall is needed. Frames that must get lost are sent
to a machine that does not exist. A cable that is pulled at the switch leaves both ends up, so no
kernel notices.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.contract.processes.cable import Cable, Impairment

LIMIT_S = 20.0
SWITCH = "switch"
INTERFACE = "eth0"
NOBODY = "02:00:00:00:77:ff"
_CLONE_NEWNET = 0x40000000


class Host:
    """One namespace with one network interface.

    Args:
        network: The host's network.
        number: The host's number in the network.
    """

    def __init__(self, network: Network, number: int) -> None:
        self.namespace = network.namespace(f"host{number}")
        self.address = f"198.18.77.{number + 1}"
        self.mac = f"02:00:00:00:77:{number + 1:02x}"
        self.port = f"port{number}"
        self._network = network

    def ip(self, *arguments: str) -> None:
        run("ip", "-n", self.namespace, *arguments)

    # Failures and repairs

    def pull(self) -> None:
        """Pulls the cable: nothing passes any more, and no kernel notices."""
        self._network.switch("link", "set", self.port, "nomaster")

    def plug(self) -> None:
        self._network.switch("link", "set", self.port, "master", SWITCH)

    def down(self) -> None:
        """Takes the interface down, which the host's own kernel notices."""
        self.ip("link", "set", INTERFACE, "down")

    def up(self) -> None:
        self.ip("link", "set", INTERFACE, "up")

    def mute(self, other: Host) -> None:
        """Blocks all frames from here to another host; frames from there still arrive here."""
        self.ip("neigh", "replace", other.address, "lladdr", NOBODY, "dev", INTERFACE)

    def unmute(self, other: Host) -> None:
        self.ip("neigh", "replace", other.address, "lladdr", other.mac, "dev", INTERFACE)

    def lose_address(self) -> None:
        self.ip("addr", "del", f"{self.address}/24", "dev", INTERFACE)

    def regain_address(self) -> None:
        self.ip("addr", "add", f"{self.address}/24", "dev", INTERFACE)

    def impair(self, how: Impairment) -> None:
        """Makes the kernel lose and delay sent frames; skips the test if it cannot."""
        delay = (f"{1e3 * how.delay_s:g}ms", f"{1e3 * how.jitter_s:g}ms")
        loss = ("loss", f"{100 * how.loss:g}%")
        try:
            run("tc", "-n", self.namespace, "qdisc", "add", "dev", INTERFACE, "root", "netem",
                *loss, "delay", *delay)  # fmt: skip
        except OSError as error:
            pytest.skip(f"this kernel cannot lose and delay what is sent (netem): {error}")

    def vanish(self) -> None:
        """Switches the host off: it sends nothing any more, whatever runs there."""
        self._network.switch("link", "del", self.port)
        run("ip", "netns", "del", self.namespace)

    def boot(self, mtu_bytes: int = 1500) -> None:
        """Switches the host on, for the first time or again, without former state."""
        run("ip", "netns", "add", self.namespace)
        if self._network.cable is None:
            self._network.switch("link", "add", self.port, "type", "veth",
                                 "peer", "name", INTERFACE, "netns", self.namespace)  # fmt: skip
            self._network.switch("link", "set", self.port, "mtu", str(mtu_bytes))
            self._network.switch("link", "set", self.port, "up")
            self.plug()
        else:
            self._network.cable.connect(self.namespace, INTERFACE)
        self.ip("link", "set", INTERFACE, "address", self.mac)
        self.ip("link", "set", INTERFACE, "mtu", str(mtu_bytes))
        self.regain_address()
        for interface in (INTERFACE, "lo"):
            self.ip("link", "set", interface, "up")


class Network:
    """A switch, and hosts with cables to it.

    Args:
        count: Number of hosts.
        impairment: If given, a single cable with it connects two hosts, without the switch.
        mtu_bytes: Size of the longest packet.
    """

    def __init__(self, count: int, impairment: Impairment | None, mtu_bytes: int) -> None:
        self._prefix = f"weft-{os.getpid()}"
        self.cable = Cable(impairment) if impairment else None
        self.hosts = [Host(self, number) for number in range(count)]
        self._mtu_bytes = mtu_bytes

    def namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def switch(self, *arguments: str) -> None:
        run("ip", "-n", self.namespace(SWITCH), *arguments)

    def make(self) -> None:
        run("ip", "netns", "add", self.namespace(SWITCH))
        if self.cable is None:
            self.switch("link", "add", SWITCH, "type", "bridge")
            self.switch("link", "set", SWITCH, "mtu", str(self._mtu_bytes), "up")
        for host in self.hosts:
            host.boot(self._mtu_bytes)
        for host in self.hosts:
            for other in self.hosts:
                if other is not host:
                    host.unmute(other)

    def close(self) -> None:
        names = [self.namespace(SWITCH), *(host.namespace for host in self.hosts)]
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=LIMIT_S)
        if self.cable is not None:
            self.cable.close()


@contextlib.contextmanager
def network(
    count: int = 2, *, impairment: Impairment | None = None, mtu_bytes: int = 1500
) -> Iterator[list[Host]]:
    """Makes hosts; skips the test where namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("there is no command 'ip' to make network namespaces with")
    made = Network(count, impairment, mtu_bytes)
    try:
        try:
            made.make()
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield made.hosts
    finally:
        made.close()


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def enter(namespace: str) -> None:
    """Moves this thread, and those that it starts, to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
