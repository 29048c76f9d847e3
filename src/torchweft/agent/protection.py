"""What a worker is told of strangers and of networks."""

from __future__ import annotations

from typing import NamedTuple

from torchweft.secret import Secret
from torchweft.transport.secure import TlsOptions


class Protection(NamedTuple):
    """Who is let in, and how connections are protected.

    Attributes:
        key: What others must have, of this run.
        has_secret: Whether it was made with a secret of the group; if not, whoever reads the
            rendezvous store has it.
        tls: How TCP connections are secured; None for not at all.
    """

    key: Secret
    has_secret: bool = False
    tls: TlsOptions | None = None

    @classmethod
    def of_run(
        cls, token: str, secret: Secret | None = None, tls: TlsOptions | None = None
    ) -> Protection:
        """Returns the protection of the run with a token, by a secret if there is one."""
        key = Secret(token.encode()) if secret is None else secret.derive(token)
        return cls(key, secret is not None, tls)
