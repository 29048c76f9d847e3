"""The TLS options of a worker."""

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

    Every worker both listens and connects, so each has a certificate. A certificate signed by an
    authority in ``ca`` admits its holder: use an authority of your own, for this purpose only.
    With a public authority, any owner of a web site would be admitted, unless ``name`` is set.

    Attributes:
        certificate: File with this worker's certificate, then any intermediate certificates, in
            PEM.
        ca: File with the authorities that sign the certificates of all workers, in PEM.
        key: File with the certificate's key, in PEM, without a passphrase; empty if the
            certificate's file contains it.
        mutual: Whether a worker that connects to this worker must have a certificate, too.
        name: Name or IP address that the peer's certificate must be issued to, as subject
            alternative name and without wildcards; empty to accept any signed certificate.
    """

    certificate: str
    ca: str
    key: str = ""
    mutual: bool = True
    name: str = ""

    @classmethod
    def from_environment(cls) -> TlsOptions | None:
        """Returns the options from the ``WEFT_TLS_...`` variables; None without a file or name.

        Raises:
            ConfigurationError: They set some, but not both certificate and authorities.
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
        """Checks that a worker with the same options would admit this worker.

        Raises:
            ConfigurationError: A file is missing or wrong, or the certificate has expired, is from
                another authority, or for another name.
        """
        self.contexts.check(self.name)

    def client_context(self) -> ssl.SSLContext:
        """Returns the OpenSSL context for dialling, remade when a file has changed."""
        return self.contexts.current().client

    def server_context(self) -> ssl.SSLContext:
        """Returns the OpenSSL context for accepting, remade when a file has changed."""
        return self.contexts.current().server

    @functools.cached_property
    def contexts(self) -> Contexts:
        """The OpenSSL contexts, made when first used."""
        files = Files(self.certificate, self.key or self.certificate, self.ca)
        return Contexts(files, is_mutual=self.mutual)

    def __reduce__(self) -> tuple[object, ...]:
        # OpenSSL contexts stay in their process.
        return type(self), tuple(getattr(self, field.name) for field in fields(self))
