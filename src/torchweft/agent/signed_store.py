"""A rendezvous store that accepts only values written by holders of the group's secret.

PyTorch's stores accept every client. A malicious client could direct the workers to a man in the
middle, which relays the proofs of both sides. So each worker signs its values, along with their
keys, with the secret, and reads only signed values. The reader must check that a value belongs to
*this* run. Counters, and the presence of keys, are not protected: an attacker can use them to keep
workers from finding each other, and no more.
"""

from __future__ import annotations

from typing import Any

from torchweft.errors import RendezvousError
from torchweft.secret import Secret

_PREFIX = b"signed:"
_SIGNATURE_BYTES = 64  # in hexadecimal


class SignedStore:
    """Signs the values written to another store, and verifies the values read.

    Args:
        store: A ``torch.distributed.Store``.
        secret: The group's secret. If None, nothing is signed, and signed values are refused.
    """

    def __init__(self, store: Any, secret: Secret | None) -> None:
        self._store = store
        self._key = None if secret is None else secret.derive("rendezvous")
        self.add = store.add
        self.check = store.check
        self.wait = store.wait

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._signed(key, value))

    def get(self, key: str) -> bytes:
        """Returns the value of a key.

        Raises:
            RendezvousError: The value was not written by a holder of the secret.
        """
        return self._checked(key, bytes(self._store.get(key)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets a key that is not there; returns its value afterwards. Raises as ``get``."""
        if expected:
            raise ValueError("a signed value cannot be compared")
        there = self._store.compare_set(key, "", self._signed(key, desired))
        return self._checked(key, bytes(there))

    def _signed(self, key: str, value: str | bytes) -> str:
        text = value if isinstance(value, str) else value.decode()
        if self._key is None:
            return text
        signature = self._key.sign(key.encode(), text.encode()).hex()
        return f"{_PREFIX.decode()}{signature}{text}"

    def _checked(self, key: str, written: bytes) -> bytes:
        is_signed = written.startswith(_PREFIX)
        if self._key is None:
            if is_signed:
                raise RendezvousError(
                    f"the rendezvous store's value of {key!r} is signed with a secret, and this "
                    "worker has none; give all workers of the group the same (WEFT_SECRET_FILE)"
                )
            return written
        signature, value = _split(written[len(_PREFIX) :])
        if is_signed and self._key.verify(signature, key.encode(), value):
            return value
        raise RendezvousError(
            f"the rendezvous store's value of {key!r} was not written with the secret of this "
            "worker: some worker of the group has another secret or none (WEFT_SECRET_FILE), or a "
            "stranger has reached the store"
        )


def _split(content: bytes) -> tuple[bytes, bytes]:
    """Returns a signature and the signed value; a malformed signature becomes empty."""
    try:
        signature = bytes.fromhex(content[:_SIGNATURE_BYTES].decode())
    except ValueError:
        signature = b""
    return signature, content[_SIGNATURE_BYTES:]
