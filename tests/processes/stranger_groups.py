"""Groups of workers that strangers attack, for the tests and for the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.internal import overridden
from tests.open_workers import OpenWorkers
from tests.processes import strange_members, unpickling
from tests.processes.strange_members import State
from tests.processes.strangers import GREETING_S, Got, Row, Victim
from torchweft import secret
from torchweft.engine.io import addresses
from torchweft.engine.io.secure import TlsOptions
from torchweft.engine.worker.rendezvous import GroupFile
from torchweft.secret import Secret

VICTIM, OTHER, ATTACKER = "victim", "other", "attacker"
STRANGER_LIMIT = 64
MEMORY_BYTES = 64 << 20
FEW_THREADS = 12
SLOWEST_S = 2.0
"""How long a call between members may take during an attack."""
_TOKEN_CHARACTERS = 32


class Group:
    """An open group whose workers talk over TCP: a victim, and another worker that calls it.

    Args:
        warm: Starts the processes.
        folder: Gets the store and the secret.
        tls: TLS options of all workers.
        settings: Further environment variables.
        options: Options of the victim alone.
    """

    def __init__(
        self,
        warm: OpenWorkers,
        folder: Path,
        tls: TlsOptions | None = None,
        settings: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.warm = warm
        self._folder = folder
        self._tls = tls
        self.names: list[str] = []
        self._settings = {
            "WEFT_SECRET_FILE": str(folder / "secret"),
            "WEFT_CONNECT_TIMEOUT_S": str(GREETING_S),
            "WEFT_STRANGER_LIMIT": str(STRANGER_LIMIT),
            **overridden(settings, UNIX_SOCKETS=0),
        }
        secret.write_new(folder / "secret")
        self.join(VICTIM, 0, **options)
        self.join(OTHER, 1)
        self.do(OTHER, strange_members.begin_calls, VICTIM)
        self.do(OTHER, strange_members.calls_go_on, VICTIM)

    def begin_join(self, name: str, rank: int, **options: Any) -> None:
        self.names.append(name)
        told = {"tls": self._tls, **options}
        method = f"file://{self._folder / 'store'}"
        begun = (strange_members.join, name, rank, method, self._settings, told)
        self.warm.begin(self._process(name), *begun)

    def join(self, name: str, rank: int, **options: Any) -> None:
        self.begin_join(name, rank, **options)
        self.warm.result(self._process(name))

    def do(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        return self.warm.do(self._process(name), function, *args)

    def _process(self, name: str) -> str:
        return f"{self._folder.name}: {name}"

    def close(self) -> None:
        for name in self.names:
            self.warm.kill(self._process(name))

    def victim(self) -> Victim:
        address = addresses.parse(self.do(VICTIM, strange_members.tcp_address))
        assert isinstance(address, addresses.TcpAddress)
        store = GroupFile(str(self._folder / "store"), GREETING_S)
        return Victim(
            address,
            id=0,
            other=1,
            secret=Secret.from_file(self._folder / "secret"),
            token=store.get("weft/0/token").decode()[-_TOKEN_CHARACTERS:],
            session=self.do(VICTIM, strange_members.session_with, OTHER),
            dial_at=self._dial_at,
            tls=self._tls,
        )

    def _dial_at(self, who: str, address: str, worker: int) -> Callable[[], str]:
        process = self._process(who)
        self.warm.begin(process, strange_members.dial_at, address, worker)
        return lambda: str(self.warm.result(process))

    def state(self) -> State:
        told: State = self.do(VICTIM, strange_members.state)
        return told

    def suffer(self, row: Row, victim: Victim) -> Got:
        """Runs a stranger's attack; checks that it harms neither the victim nor the others."""
        self.do(VICTIM, unpickling.watch)
        before = self.state()
        try:
            got = row.attack(victim)
            slowest_s = self.do(OTHER, strange_members.calls_go_on, VICTIM)
            after = self.state()
        finally:
            self.do(VICTIM, unpickling.unwatch)
        assert after.unpickled == [], after.unpickled[0]
        assert after.members == before.members
        assert after.threads <= before.threads + FEW_THREADS
        assert after.descriptors <= before.descriptors + FEW_THREADS
        assert after.largest_bytes <= before.largest_bytes + MEMORY_BYTES
        assert slowest_s < SLOWEST_S
        return got
