"""Authorities and certificates for a test, as files."""

from __future__ import annotations

import datetime
import itertools
from pathlib import Path
from typing import Any

import trustme

from torchweft import TlsOptions

LOOPBACK = "127.0.0.1"


class Authority:
    """A certificate authority, whose own certificate is in the file ``path``.

    Args:
        folder: Where the files go.
    """

    _numbers = itertools.count()

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self.path = str(self._next("authority"))
        self._authority.cert_pem.write_to_path(self.path)

    def options(self, **options: Any) -> TlsOptions:
        """Returns options, by default with a new certificate of this authority."""
        return TlsOptions(**{"certificate": self.certificate(), "ca": self.path, **options})

    def certificate(self, name: str = LOOPBACK, *, is_expired: bool = False) -> str:
        """Returns the path of a new certificate with its key."""
        path = self._next("certificate")
        self._issue(name, is_expired).private_key_and_cert_chain_pem.write_to_path(str(path))
        return str(path)

    def separate_files(self, name: str = LOOPBACK) -> tuple[str, str]:
        """Returns the paths of a new certificate and of its key."""
        issued = self._issue(name, is_expired=False)
        certificate, key = self._next("certificate"), self._next("key")
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return str(certificate), str(key)

    def _issue(self, name: str, is_expired: bool) -> trustme.LeafCert:
        end = datetime.datetime(2001, 1, 1, tzinfo=datetime.timezone.utc) if is_expired else None
        return self._authority.issue_cert(name, not_after=end)

    def _next(self, kind: str) -> Path:
        return self._folder / f"{kind}-{next(self._numbers)}.pem"
