"""The channels that one side of a connection can use, as described to the other side."""

from __future__ import annotations

from dataclasses import dataclass

from torchweft.errors import ProtocolError
from torchweft.probe import Facts


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Describes one side of a connection to the other.

    Attributes:
        facts: The process and its host.
        nonce_address: Address of its nonce in its memory; 0 if it offers none.
        nonce: The nonce, in hexadecimal digits.
        cma_obstacle: Why it cannot pull from any process; empty if it can.
        memory_nonce: The first bytes of its shared memory, in hexadecimal digits; empty if it
            offers none.
    """

    facts: Facts
    nonce_address: int
    nonce: str
    cma_obstacle: str
    memory_nonce: str = ""

    def as_json(self) -> dict[str, object]:
        """Returns the capabilities as a dictionary that JSON can carry."""
        return {
            "facts": self.facts.as_json(),
            "nonce_address": self.nonce_address,
            "nonce": self.nonce,
            "cma_obstacle": self.cma_obstacle,
            "memory_nonce": self.memory_nonce,
        }

    @classmethod
    def from_json(cls, data: object) -> Capabilities:
        """Returns the capabilities that ``as_json`` wrote.

        Raises:
            ProtocolError: A field is missing or has the wrong type.
        """
        if not isinstance(data, dict):
            raise ProtocolError(f"capabilities are a {type(data).__name__}, not an object")
        address = data.get("nonce_address")
        if not isinstance(address, int) or not 0 <= address < 1 << 64:
            raise ProtocolError(f"a peer's nonce lies at {address!r}, which is no address")
        texts = [data.get(name) for name in ("nonce", "cma_obstacle", "memory_nonce")]
        if not all(isinstance(text, str) for text in texts):
            raise ProtocolError("a peer's nonces and its obstacle are to be texts")
        nonce, obstacle, memory_nonce = map(str, texts)
        facts = Facts.from_json(data.get("facts"))
        return cls(facts, address, nonce, obstacle, memory_nonce)
