"""The launcher over ``ssh``: a list of hosts, and nothing installed on them but Weft itself."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from torchweft.errors import ConfigurationError, HostError
from torchweft.launch.hosts import Host
from torchweft.launch.hosts_launcher import HostsLauncher

CONNECT_TIMEOUT_S = 10
_ALIVE_S = 10
_ALIVE_COUNT = 3
_ANSWER_S = 20.0
"""Seconds for the login and the interpreter's start, after the connection."""
_CONFIGURATION_LIMIT_S = 20.0
"""Seconds for ``ssh`` to read its own configuration, which may run commands."""

_ENTRY = re.compile(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d+))?")


class _Entry(NamedTuple):
    name: str
    workers: int | None


class Ssh(HostsLauncher):
    """Starts workers on hosts over ``ssh``, in the folder of this process.

    The hosts need the same Python environment at the same path, the same folder (or a shared file
    system), and a login without a password, which is never asked for.

    Args:
        hosts: ``"a,b:4"``: names as ``ssh`` knows them, with the number of workers on each. If no
            numbers are given, the workers are shared out evenly.
        python: The interpreter on the hosts; by default the path of this one.
        connect_timeout: Seconds within which each host must be reached.
        options: Further options of ``ssh``, such as ``"-p 2222 -i KEY"``.

    Raises:
        ConfigurationError: The list cannot be read, or there is no ``ssh`` here.
    """

    def __init__(
        self,
        hosts: str,
        *,
        python: str = sys.executable,
        connect_timeout: int = CONNECT_TIMEOUT_S,
        options: str = "",
    ) -> None:
        self._entries = _parse(hosts)
        self.python = python
        if python.startswith("-"):
            raise ConfigurationError(f"the interpreter on the hosts is {python!r}; pass a path")
        if connect_timeout < 1:
            raise ConfigurationError(
                f"the connect timeout is {connect_timeout}; it must be at least 1 second"
            )
        self._timeout_s = connect_timeout
        if shutil.which("ssh") is None:
            raise ConfigurationError(
                "there is no command 'ssh' here; install it (Debian: openssh-client)"
            )
        self._ssh = (
            *("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_timeout}"),
            *("-o", f"ServerAliveInterval={_ALIVE_S}", "-o", f"ServerAliveCountMax={_ALIVE_COUNT}"),
            *shlex.split(options),
        )

    @classmethod
    def add_options(cls, parser: argparse._ArgumentGroup) -> None:
        """Adds the options of ``--on ssh``."""
        parser.add_argument(
            "--hosts", metavar="LIST", help="hosts, and how many workers on each, as a,b:4"
        )
        parser.add_argument(
            "--python", default=sys.executable, metavar="PATH", help="the interpreter there"
        )
        parser.add_argument(
            "--connect-timeout",
            type=int,
            default=CONNECT_TIMEOUT_S,
            metavar="S",
            help="seconds within which each host must be reached (default: %(default)s)",
        )
        parser.add_argument(
            "--ssh-options", default="", metavar="TEXT", help="further options of ssh"
        )

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Ssh:
        """Returns the launcher that the command line describes."""
        if options.hosts is None:
            raise ConfigurationError(
                "ssh needs hosts: torchweft run --on ssh --hosts a,b:4 ..., or "
                "torchweft.cluster(on=torchweft.launch.Ssh('a,b:4'))"
            )
        return cls(
            options.hosts,
            python=options.python,
            connect_timeout=options.connect_timeout,
            options=options.ssh_options,
        )

    def count(self, wanted: int | None) -> int | None:
        """Returns the wanted number of workers, or that of the list."""
        return sum(entry.workers or 1 for entry in self._entries) if wanted is None else wanted

    def hosts(self, workers: int) -> Sequence[Host]:
        """Returns the hosts that get workers."""
        shares = _shares([entry.workers for entry in self._entries], workers)
        return [
            Host(
                entry.name,
                self._address_of(entry.name),
                share,
                (*self._ssh, "--", entry.name, self._remote_command()),
                self._timeout_s + _ANSWER_S,
            )
            for entry, share in zip(self._entries, shares, strict=True)
            if share
        ]

    def _remote_command(self) -> str:
        path = os.environ.get("PYTHONPATH")
        variables = [] if path is None else ["env", f"PYTHONPATH={path}"]
        return "exec " + shlex.join([*variables, self.python, "-m", "torchweft.launch.host_agent"])

    def _address_of(self, name: str) -> str:
        """Returns the address that ``ssh`` itself would connect to, which may be another name's."""
        try:
            asked = subprocess.run(
                [*self._ssh, "-G", "--", name],
                capture_output=True,
                text=True,
                check=False,
                timeout=_CONFIGURATION_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise HostError(
                f"host {name!r}: 'ssh -G' has not read its configuration within "
                f"{_CONFIGURATION_LIMIT_S:g} s; a command in it ('Match exec') hangs",
                host=name,
            ) from None
        lines = [line.split(None, 1) for line in asked.stdout.splitlines()]
        found = [line[1] for line in lines if line[0] == "hostname" and len(line) == 2]
        return found[0] if found else name.rpartition("@")[2]


_UNSAFE = frozenset("\"'`$;&<>|(){}*?!# ")


def _is_host(name: str) -> bool:
    """Whether ``ssh``, and a shell that its settings run, would take a name for a host."""
    parts = name.rpartition("@")
    is_option = any(part.startswith("-") for part in parts)
    return bool(parts[2]) and not is_option and name.isprintable() and _UNSAFE.isdisjoint(name)


def _parse(text: str) -> list[_Entry]:
    if not isinstance(text, str):
        raise ConfigurationError(f"hosts is {text!r}; pass a text like 'a,b:4'")
    entries: list[_Entry] = []
    for each in text.split(","):
        found = _ENTRY.fullmatch(each.strip())
        if found is None or not _is_host(found[1].strip("[]")):
            raise ConfigurationError(
                f"the list of hosts {text!r} has {each!r}; write it like a,b:4, with the number of "
                "workers after the colon, and options in --ssh-options"
            )
        if found[2] is not None and int(found[2]) < 1:
            raise ConfigurationError(f"host {found[1]!r} is to have {found[2]} workers")
        workers = None if found[2] is None else int(found[2])
        entries.append(_Entry(found[1].strip("[]"), workers))
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(
                f"host {name!r} is twice in the list; name it once, as {name}:{names.count(name)}"
            )
    return entries


def _shares(given: Sequence[int | None], workers: int) -> list[int]:
    """Returns how many of the workers each host gets."""
    if all(each is None for each in given):
        share, more = divmod(workers, len(given))
        return [share + (index < more) for index in range(len(given))]
    shares: list[int] = []
    for each in given:
        shares.append(min(each or 1, workers - sum(shares)))
    if sum(shares) < workers:
        raise ConfigurationError(
            f"{workers} workers are wanted, but the hosts have place for {sum(shares)}; raise the "
            "numbers after the colons, or lower -n"
        )
    return shares
