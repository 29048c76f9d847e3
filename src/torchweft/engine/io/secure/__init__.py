"""TLS for TCP connections, with the interface of a connected socket.

Python's own ``SSLSocket`` cannot be read by one thread while another one writes, and does not
support ``MSG_DONTWAIT``; Weft needs both. So TLS itself runs in memory, under a lock that is never
held while a thread waits, and the socket is read and written separately.

Rules of this folder:

- TLS 1.3 and nothing older; certificates are always verified.
- A break of an established connection is a ``ConnectionError``; a failed handshake is a
  ``TlsError``; settings that cannot work are a ``ConfigurationError``.
- A connection that ends without the other side's signed farewell was *cut off*. That is an error
  and no end of file: otherwise an attacker on the path could truncate a stream unnoticed.

========== ===================================================================
options    a worker's TLS options, the OpenSSL contexts made from them, and the TLS handshake
connection a TLS stream without a socket, and the stream with its socket
========== ===================================================================
"""

from torchweft.engine.io.secure.connection import SecureConnection
from torchweft.engine.io.secure.options import TlsOptions, secure_client, secure_server

__all__ = ["SecureConnection", "TlsOptions", "secure_client", "secure_server"]
