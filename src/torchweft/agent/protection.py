"""How a worker authenticates peers and secures connections."""

from __future__ import annotations

from typing import NamedTuple

from torchweft.secret import Secret
from torchweft.transport.secure import TlsOptions


class Protection(NamedTuple):
    """How peers are authenticated, and how connections are protected.

    Attributes:
        key: The key of this run, which peers must have.
        has_secret: Whether the key was made with a secret of the group; if not, every reader of
            the rendezvous store has the key.
        tls: How TCP connections are secured; None for no TLS.
    """

    key: Secret
    has_secret: bool = False
    tls: TlsOptions | None = None

    @classmethod
    def of_run(
        cls, token: str, secret: Secret | None = None, tls: TlsOptions | None = None
    ) -> Protection:
        """Returns the protection for the run with a token; its key uses the secret, if any."""
        key = Secret(token.encode()) if secret is None else secret.derive(token)
        return cls(key, secret is not None, tls)
