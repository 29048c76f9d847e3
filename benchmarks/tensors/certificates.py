"""A certificate for the sides that use TLS, in files that vanish with the measurement."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

CERTIFICATE_VARIABLE = "WEFT_TLS_CERT"
CA_VARIABLE = "WEFT_TLS_CA"
LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def certificate() -> Iterator[dict[str, str]]:
    """Yields variables that name a new certificate and its authority.

    Raises:
        ImportError: ``trustme``, which makes them, is not installed.
    """
    import trustme

    authority = trustme.CA()
    issued = authority.issue_cert(LOOPBACK)
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            CERTIFICATE_VARIABLE: str(Path(folder) / "certificate.pem"),
            CA_VARIABLE: str(Path(folder) / "authority.pem"),
        }
        issued.private_key_and_cert_chain_pem.write_to_path(paths[CERTIFICATE_VARIABLE])
        authority.cert_pem.write_to_path(paths[CA_VARIABLE])
        yield paths
