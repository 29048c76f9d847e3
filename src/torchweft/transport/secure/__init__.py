"""TLS for TCP connections, as something that can be used like a connected socket.

Python's own ``SSLSocket`` cannot be read by one thread while another one writes, and knows no
``MSG_DONTWAIT``; Weft needs both. So TLS itself runs in memory, under a lock that is never held
while a thread waits, and the socket is read and written beside it.

Rules of this folder:

- TLS 1.3 and nothing older; certificates are verified, always.
- What is told of an established connection that broke is a ``ConnectionError``; a handshake that
  failed is a ``TlsError``; settings that cannot work are a ``ConfigurationError``.
- A connection that ends without the other side's signed farewell was *cut off*: that is an error,
  never an end of file, so that nobody on the way can make a part of a stream look like all of it.

========== ===================================================================
options    what a worker is told: files, whether mutual, which name
contexts   the settings of OpenSSL made of them, again when the files change
stream     one TLS connection without a socket: bytes in, bytes out
connection the socket beside it
handshake  how a connection begins, within a time limit
refusals   what went wrong, in words
========== ===================================================================
"""

from torchweft.transport.secure.connection import SecureConnection
from torchweft.transport.secure.handshake import looks_like_tls, secure_client, secure_server
from torchweft.transport.secure.options import TlsOptions

__all__ = ["SecureConnection", "TlsOptions", "looks_like_tls", "secure_client", "secure_server"]
