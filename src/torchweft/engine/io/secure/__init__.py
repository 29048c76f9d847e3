"""TLS for TCP connections, with the interface of a connected socket.

Rules of this folder:

- TLS 1.3 and nothing older; certificates are always verified.
- A break of an established connection is a ``ConnectionError``; a failed handshake is a
  ``TlsError``; settings that cannot work are a ``ConfigurationError``.
- A connection that ends without the other side's signed farewell was *cut off*. That is an error
  and no end of file: otherwise an attacker on the path could truncate a stream unnoticed.

========== ===================================================================
options    a worker's TLS options, and the OpenSSL contexts made from them
connection the TLS handshake, and a connection that can be used like a socket
========== ===================================================================
"""

from torchweft.engine.io.secure.connection import SecureConnection, secure_client, secure_server
from torchweft.engine.io.secure.options import TlsOptions

__all__ = ["SecureConnection", "TlsOptions", "secure_client", "secure_server"]
