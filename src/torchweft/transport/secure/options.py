"""What a worker is told about TLS."""

from __future__ import annotations

import functools
import ssl
from dataclasses import dataclass, fields

from torchweft import knobs
from torchweft.errors import ConfigurationError
from torchweft.transport.secure.contexts import Contexts, Files


@dataclass(frozen=True)
class TlsOptions:
    """TLS for the TCP connections of one worker.

    Every worker both listens and connects, so each has a certificate. Who may connect is who has
    one that was signed by an authority in ``ca``: use an authority of your own, for this purpose
    only. With a public one, anybody with a web site would be let in, unless there is a ``name``.

    Attributes:
        certificate: File with this worker's certificate, then any between it and the authority's,
            in PEM.
        ca: File with the authorities that sign the certificates of all workers, in PEM.
        key: File with the certificate's key, in PEM, without a passphrase; empty where it is in
            the certificate's file.
        mutual: Whether whoever connects to this worker must have a certificate, too.
        name: Name or IP address for which the other side's certificate must be made out, as
            subject alternative name and without wildcards; empty if any signed one will do.
    """

    certificate: str
    ca: str
    key: str = ""
    mutual: bool = True
    name: str = ""

    @classmethod
    def from_environment(cls) -> TlsOptions | None:
        """Returns what the ``WEFT_TLS_...`` variables say; None if they name no certificate.

        Raises:
            ConfigurationError: They name some of the files only.
        """
        certificate, ca = knobs.TLS_CERT.get(), knobs.TLS_CA.get()
        key, name = knobs.TLS_KEY.get(), knobs.TLS_NAME.get()
        if not (certificate or ca or key or name):
            return None
        for knob in (knobs.TLS_CERT, knobs.TLS_CA):
            if not knob.get():
                raise ConfigurationError(
                    f"some of WEFT_TLS_... is set, but {knob.variable} is not; TLS needs "
                    f"{knobs.TLS_CERT.variable} and {knobs.TLS_CA.variable}"
                )
        return cls(certificate, ca, key, bool(knobs.TLS_MUTUAL.get()), name)

    def check(self) -> None:
        """Sees whether a worker with the same options would let this one in.

        Raises:
            ConfigurationError: A file is missing or wrong, or the certificate has expired, is of
                another authority, or of another name.
        """
        self.contexts.check(self.name)

    def client_context(self) -> ssl.SSLContext:
        """Returns OpenSSL's settings for connecting; made again when a file has changed."""
        return self.contexts.current().client

    def server_context(self) -> ssl.SSLContext:
        """Returns OpenSSL's settings for being connected to; made again when a file has changed."""
        return self.contexts.current().server

    @functools.cached_property
    def contexts(self) -> Contexts:
        """OpenSSL's settings, not made before they are asked for."""
        files = Files(self.certificate, self.key or self.certificate, self.ca)
        return Contexts(files, is_mutual=self.mutual)

    def __reduce__(self) -> tuple[object, ...]:
        # The settings of OpenSSL stay in their process.
        return type(self), tuple(getattr(self, field.name) for field in fields(self))
