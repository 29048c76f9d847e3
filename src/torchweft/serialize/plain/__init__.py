"""Converts values to bytes and back without pickle, for strict workers.

``tags`` has the format, ``encoding`` writes it and ``decoding`` reads it.
"""

from torchweft.serialize.plain.decoding import decode
from torchweft.serialize.plain.encoding import TAKES, Encoder
from torchweft.serialize.plain.tags import MARK

__all__ = ["MARK", "TAKES", "Encoder", "decode"]
