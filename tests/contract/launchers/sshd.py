"""An ``sshd`` of this test, on loopback, with keys of its own."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.contract.launchers.commands import needed, wait_until

SERVER = """\
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/key.pub
PidFile {directory}/pid
StrictModes no
UsePAM no
PasswordAuthentication no
LogLevel DEBUG1
"""

CLIENT = """\
Host alpha
    HostName 127.0.0.1
Host beta
    HostName 127.0.0.2
Host closed
    HostName 127.0.0.3
Host silent
    HostName 127.0.0.1
    Port {silent}
Host *
    Port {port}
    IdentityFile {directory}/key
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile {directory}/known_hosts
"""


@dataclass(frozen=True)
class Sshd:
    """A running server.

    Attributes:
        options: Options for ``ssh``: it knows the hosts alpha and beta, silent, which takes
            connections and says nothing, and closed, where nothing listens.
        pid: Its process.
        log: Its log.
    """

    options: str
    pid: int
    log: Path

    def sessions(self) -> list[int]:
        """Returns the processes that serve one connection each."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in children.split()]


@contextmanager
def running(directory: Path) -> Iterator[Sshd]:
    sshd, keygen = needed("sshd", "openssh-server"), needed("ssh-keygen", "openssh-client")
    needed("ssh", "openssh-client")
    for name in ("host_key", "key"):
        command = [keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)]
        subprocess.run(command, check=True)
    if os.geteuid() == 0:  # Then it wants a folder that its package's service makes.
        Path("/run/sshd").mkdir(exist_ok=True)
    with socket.socket() as silent, socket.socket() as free:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        free.bind(("127.0.0.1", 0))
        ports = {"port": free.getsockname()[1], "silent": silent.getsockname()[1]}
        free.close()
        for name, text in (("server", SERVER), ("client", CLIENT)):
            (directory / name).write_text(text.format(directory=directory, **ports))
        log = directory / "log"
        with (
            log.open("w") as file,
            subprocess.Popen(
                [sshd, "-D", "-e", "-f", str(directory / "server")],
                stdin=subprocess.DEVNULL,
                stderr=file,
            ) as process,
        ):
            try:
                wait_until(lambda: "Server listening on 127.0.0.1" in log.read_text(), 10)
                yield Sshd(f"-F {directory / 'client'}", process.pid, log)
            finally:
                process.terminate()
